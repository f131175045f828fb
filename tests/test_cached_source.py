"""What the local cache of the Hub stands for when the Hub can't be asked."""

import errno
import shutil

import pytest
from huggingface_hub import constants

from hf_hyperconn.conversion.checkpoint.source import open_source
from hf_hyperconn.errors import UnsupportedCheckpointError


@pytest.mark.parametrize(
    ("error", "taken"),
    [
        (PermissionError(errno.EACCES, "Permission denied"), False),
        (ConnectionResetError("closed"), True),
        (PermissionError(errno.EACCES, "Permission denied", constants.HF_TOKEN_PATH), True),  # of another user
    ],
    ids=["cache", "way", "token"],
)
def test_only_without_a_way_to_the_hub_an_older_commit_of_the_cache_is_taken(
    error, taken, llama_folder, tmp_path, monkeypatch, caplog
):
    """What can't be written in the cache must not bring what the Hub no longer has."""
    commit = 40 * "a"
    cached = tmp_path / "models--org--tiny"
    shutil.copytree(llama_folder, cached / "snapshots" / commit)
    (cached / "refs").mkdir()
    (cached / "refs" / "main").write_text(commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))

    def fail(*args, **kwargs):
        raise error

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", fail)
    if not taken:
        with pytest.raises(UnsupportedCheckpointError, match="kept in the cache of the Hub, '.*': Permission"):
            open_source("org/tiny")
    else:
        assert open_source("org/tiny").commit == commit
        assert f"Commit {commit} of the cache is used" in caplog.text
        shutil.rmtree(cached)
        with pytest.raises(
            UnsupportedCheckpointError, match=r"can't be reached|the token for the Hub, .* can't be read"
        ):
            open_source("org/tiny")
