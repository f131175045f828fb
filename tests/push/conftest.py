"""A conversion, and a stand-in for the Hub that takes it."""

import json
import shutil
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from transformers import LlamaForCausalLM

from hf_hyperconn.conversion.checkpoint.readme import README, with_repo_name
from hf_hyperconn.conversion.convert import convert_checkpoint
from tests.conftest import llama_config
from tests.hub import files_in
from tests.writable_hub import ATTRIBUTES, WritableHub

RECORD = "hyperconn_conversion.json"
TOKENS = {"hf_me": ("me", "team"), "hf_guest": ("guest",)}


@contextmanager
def connected(hub: WritableHub, place: Path, token: str = "hf_me"):
    """This process takes the stand-in for the Hub, and has a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "ENDPOINT", hub.url)
        patch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.url + "/{repo_id}/resolve/{revision}/{filename}")
        patch.setattr(constants, "HF_HUB_OFFLINE", False)
        patch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        patch.setattr(constants, "HF_HUB_CACHE", str(place / "cache"))
        patch.setattr(constants, "HF_TOKEN_PATH", str(place / "token"))
        patch.setattr("transformers.utils.hub._hf_api", None, raising=False)  # remembers the address of the Hub
        patch.setenv("no_proxy", "127.0.0.1")
        patch.setenv("HF_TOKEN", token)
        yield


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A tiny Llama in shards, with a license."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    LlamaForCausalLM(llama_config(initializer_range=0.2)).save_pretrained(folder, max_shard_size="50KB")
    (folder / "LICENSE").write_text("of the base")
    return folder


@pytest.fixture(scope="module")
def converted(base, tmp_path_factory) -> Path:
    """Its conversion, from the Hub."""
    place = tmp_path_factory.mktemp("converted")
    (place / "hub").mkdir()
    with WritableHub(place / "hub", TOKENS) as hub, connected(hub, place):
        hub.push("org/base", base)
        return convert_checkpoint("org/base", place / "hc", hc_mult=2, verify="structure").path


@pytest.fixture
def hub(base, tmp_path):
    """A Hub that holds the base, for the holder of a token that may write to me/ and team/."""
    (tmp_path / "hub").mkdir()
    with WritableHub(tmp_path / "hub", TOKENS) as hub, connected(hub, tmp_path):
        hub.push("org/base", base)
        yield hub


@pytest.fixture
def folder(converted, tmp_path) -> Path:
    """The conversion, to change."""
    return shutil.copytree(converted, tmp_path / "folder")


def shards(folder: Path) -> dict[str, Path]:
    """Return the base's shards, and under `hc` the shard of hyper-connections."""
    record = json.loads((folder / RECORD).read_text())
    base_shards = {shard["file"]: folder / shard["file"] for shard in record["base_shards"]}
    return {**base_shards, "hc": folder / record["hyper_connection_shard"]}


def assert_holds(hub: WritableHub, repo: str, folder: Path, names: set[str] | None = None, revision: str = "main"):
    """Require that a repo holds the folder's files, byte for byte, and no others but the Hub's own.

    Its card names the repo.
    """
    pushed, local = files_in(hub.folder(repo, revision)), files_in(folder)
    assert pushed.pop(".gitattributes").read_text() == ATTRIBUTES
    assert pushed.keys() == (local.keys() if names is None else names)
    for name, file in pushed.items():
        content = local[name].read_bytes()
        assert file.read_bytes() == (with_repo_name(content.decode(), repo).encode() if name == README else content), (
            name
        )


def writes(hub: WritableHub) -> list[str]:
    """Return the requests to change the Hub."""
    return [r.url for r in hub.requests if r.method in ("POST", "PUT") and "paths-info" not in r.url]


def with_card(folder: Path, **metadata) -> Path:
    """Write a card of some metadata into a folder, and return the folder."""
    lines = "".join(f"{name}: {json.dumps(value)}\n" for name, value in metadata.items())
    (folder / "README.md").write_text(f"---\n{lines}---\n# A model\n")
    return folder


def put_beside(folder: Path, *names: str) -> None:
    """Put files into a folder that are no part of a model."""
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text("mine")


def flip_last_byte(file: Path) -> None:
    content = file.read_bytes()
    file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))


def change_record(folder: Path, **changes) -> None:
    record = json.loads((folder / RECORD).read_text())
    (folder / RECORD).write_text(json.dumps({**record, **changes}))
