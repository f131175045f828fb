"""`hf-hyperconn plot` of folders that are not what they seem: tokenizers, links, adapters, names."""

import base64
import json
import shutil
import struct

import pytest

from hf_hyperconn.conversion.checkpoint.checkpoint import open_conversion
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.plot.models import load_connections, load_model
from hf_hyperconn.errors import UnsupportedCheckpointError
from tests.edits import configure


def normalise(folder, **normaliser):
    """Give the tokenizer of a folder another normaliser."""
    path = folder / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "normalizer": normaliser}))


def table(strings: bytes) -> dict:
    """A normaliser with a table of SentencePiece whose tree has one node, which leads out of it."""
    content = struct.pack("<II", 4, 0) + strings
    return {"type": "Precompiled", "precompiled_charsmap": base64.b64encode(content).decode()}


@pytest.mark.parametrize(
    ("normaliser", "message"),
    [
        ({"type": "Nothing"}, "can't read a text ("),
        (table(b"a\0"), "can't read a text (index out of bounds"),
    ],
    ids=("unknown", "panic"),
)
def test_a_broken_tokenizer(normaliser, message, folder, tmp_path, capfd):
    """It is refused in one line, also what Rust makes of it."""
    normalise(folder, **normaliser)
    assert main(["plot", str(folder), "--text", str(tmp_path / "text")]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert f"error: tokenizer.json of {str(folder)!r} {message}" in line
    assert not (folder / "figures").exists()


def test_pictures_do_not_go_where_a_link_leads(folder, tmp_path, refusal):
    (tmp_path / "elsewhere").mkdir()
    picture = tmp_path / "elsewhere" / "connections.png"
    picture.write_text("mine")
    (folder / "figures").symlink_to("../elsewhere")
    assert f"'{folder / 'figures'}' is a link to '{tmp_path / 'elsewhere'}', outside" in refusal(folder)
    assert picture.read_text() == "mine"
    assert main(["plot", str(folder), "-o", str(folder / "figures")]) == 0, "it was asked for"
    (folder / "figures").unlink()
    (folder / "pictures").mkdir()
    (folder / "figures").symlink_to("pictures")
    assert main(["plot", str(folder)]) == 0
    assert (folder / "pictures" / "connections.png").is_file()


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "tokenizer_config.json"])
def test_no_file_from_elsewhere_is_read(name, folder, tmp_path, refusal):
    shutil.move(folder / name, tmp_path / name)
    (folder / name).symlink_to(tmp_path / name)
    assert f"'{folder / name}' is a link to '{tmp_path / name}', outside the folder." in refusal(
        folder, "--text", tmp_path / "text"
    )


def test_a_snapshot_of_the_hub_s_cache(folder, tmp_path):
    """Which consists of links."""
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for path in folder.iterdir():
        path.rename(blobs / f"blob-of-{path.name}")
        (snapshot / path.name).symlink_to(f"../../blobs/blob-of-{path.name}")
    assert main(["plot", str(snapshot), "--text", str(tmp_path / "text"), "--kind", "streams"]) == 0
    assert [path.name for path in (snapshot / "figures").iterdir()] == ["streams.png"]


def test_an_adapter_beside_the_weights(folder, llama_folder, tmp_path, refusal):
    """Transformers would load it into them."""
    base = shutil.copytree(llama_folder, tmp_path / "base")
    for place, options in ((base, ["--against", base]), (folder, [])):
        (place / "adapter_config.json").write_text("{}")
        assert f"{str(place)!r} holds an adapter (adapter_config.json) beside its weights" in refusal(
            folder, "--text", tmp_path / "text", *options
        )


def test_a_name_is_no_formula(folder, tmp_path, capsys):
    place = folder.rename(tmp_path / r"a$\frac{$b")
    picture = tmp_path / "x.svg"
    command = ["plot", str(place), "--kind", "similarity", "--text", str(tmp_path / "text"), "-o", str(picture)]
    assert main(command) == 0, capsys.readouterr().err


@pytest.mark.parametrize("options", [(), ("--text",)])
def test_no_kernel_is_fetched(options, folder, tmp_path):
    configure(folder, _attn_implementation="some/kernel@main")
    assert main(["plot", str(folder), *options, *[str(tmp_path / "text")] * len(options)]) == 0


@pytest.mark.parametrize(
    "changes",
    [{"attention_bias": "x"}, {"num_attention_heads": -1}, {"intermediate_size": []}, {"dtype": "x"}],
)
@pytest.mark.parametrize("load", [load_model, load_connections])
def test_fields_of_other_types(load, changes, folder, refusal):
    configure(folder, **changes)
    with pytest.raises(UnsupportedCheckpointError, match=r"Transformers can't load it \(.*\). Load it with"):
        load(open_conversion(folder))
    assert "unexpected" not in refusal(folder).splitlines()[-1]


def test_a_config_without_a_number_of_layers(folder, capsys):
    configure(folder, num_hidden_layers=None)
    for command in ("inspect", "card", "refresh", "plot", "verify"):
        assert main([command, str(folder)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "has num_hidden_layers None, not a size of a model. Download it again." in line
