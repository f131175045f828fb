"""Files appear whole or not at all, and only in the folder that they are meant for."""

from pathlib import Path

import pytest

from hf_hyperconn.conversion.files import leads_out, replace_file


def test_a_file_is_replaced(tmp_path):
    for content in (b"one", b"another"):
        replace_file(tmp_path / "file", content)
        assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", content)]


@pytest.mark.parametrize("name", ["file", ".file.part"])
def test_a_link_is_not_followed(name, tmp_path):
    """Neither that of a file's own name nor one that waits under the name of what is not complete yet."""
    (tmp_path / "folder").mkdir()
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "folder" / name).symlink_to(tmp_path / "mine")
    replace_file(tmp_path / "folder" / "file", b"new")
    assert (tmp_path / "mine").read_bytes() == b"mine"
    (file,) = (tmp_path / "folder").iterdir()
    assert (file.name, file.is_symlink(), file.read_bytes()) == ("file", False, b"new")


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"old")

    def refuse(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_what_leads_out(tmp_path):
    folder = tmp_path / "models--org--name" / "snapshots" / "0123"
    blobs = tmp_path / "models--org--name" / "blobs"
    for place in (folder, blobs, folder.parent / "other"):
        place.mkdir(parents=True)
    for path in (folder / "here", blobs / "blob", folder.parent / "other" / "there", tmp_path / "secret"):
        path.write_text("")
    links = {
        "inside": "here",
        "cached": "../../blobs/blob",
        "beside": "../other/there",
        "outside": tmp_path / "secret",
        "nowhere": tmp_path / "nothing",
        "through": "../../blobs/../../secret",
    }
    for name, target in links.items():
        (folder / name).symlink_to(target)
    assert not leads_out(folder, folder / "here")
    assert {name for name in links if leads_out(folder, folder / name)} == {"beside", "outside", "nowhere", "through"}
    (tmp_path / "plain").mkdir()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "blob").write_text("")
    (tmp_path / "plain" / "link").symlink_to(tmp_path / "blobs" / "blob")
    assert leads_out(tmp_path / "plain", tmp_path / "plain" / "link"), "no cache of the Hub"
