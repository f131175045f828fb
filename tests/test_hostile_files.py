"""Files that nobody should have to read: too large, no files at all, nested without end, of other types."""

import json
import os
import struct
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from hf_hyperconn.conversion.checkpoint.source import LocalSource
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.convert import carry_out, convert_checkpoint
from hf_hyperconn.conversion.files import reading
from hf_hyperconn.conversion.files.reading import check_offsets, tensor_info
from hf_hyperconn.conversion.planning.plan import plan_conversion
from hf_hyperconn.errors import UnsupportedCheckpointError

from .edits import configure, edit_tensors


@pytest.fixture
def refusal(tmp_path, capsys):
    """Run a command, require a foreseen refusal that leaves nothing behind and takes no memory; return its message."""

    def run(*arguments) -> str:
        before = sorted(tmp_path.rglob("*"))
        tracemalloc.start()
        assert main([str(argument) for argument in arguments]) == 1
        assert tracemalloc.get_traced_memory()[1] < 2**25
        tracemalloc.stop()
        assert sorted(tmp_path.rglob("*")) == before, "something was written"
        (line,) = capsys.readouterr().err.splitlines()
        assert "unexpected" not in line
        return line

    return run


def sparse(path: Path, size: int) -> None:
    """A file of that many bytes, which takes no room."""
    with path.open("wb") as file:
        file.truncate(size)


def with_header(path: Path, header: bytes, data: bytes = b"") -> None:
    path.write_bytes(struct.pack("<Q", len(header)) + header + data)


def test_a_config_of_three_gigabytes(source, refusal, tmp_path):
    sparse(source / "config.json", 3 * 10**9)
    assert "config.json of" in (message := refusal("convert", source, tmp_path / "out"))
    assert "holds 3,000,000,000 bytes, and up to 50,000,000 are read" in message


def test_a_header_of_two_gigabytes(source, refusal, tmp_path):
    sparse(source / "model.safetensors", 3 * 10**9)
    with (source / "model.safetensors").open("r+b") as file:
        file.write(struct.pack("<Q", 2_200_000_000))
    assert "is cut short or not a safetensors file" in refusal("convert", source, tmp_path / "out")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_pipe_is_not_waited_for(name, source, refusal, tmp_path):
    (source / name).unlink()
    os.mkfifo(source / name)
    assert "has no" in refusal("convert", source, tmp_path / "out")


@pytest.mark.parametrize("path", ["fifo", "/dev/zero", "/dev/tty", "."])
def test_results_are_read_from_files_alone(path, llama_folder, tmp_path, refusal):
    out = convert_checkpoint(str(llama_folder), tmp_path / "out", verify="off").path
    os.mkfifo(tmp_path / "fifo")
    place = Path(path) if path.startswith("/") else tmp_path / path
    assert "can't read" in refusal("card", out, "--results", place)


def test_a_pipe_that_takes_the_place_of_a_file(tmp_path):
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(OSError, match="it is not a regular file"):
        reading.open_regular(tmp_path / "fifo")
    (tmp_path / "large").write_bytes(bytes(101))
    with pytest.raises(OSError, match="it holds more than 100 bytes"):
        reading.read_text(tmp_path / "large", 100)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
        ("[" * 100_000, "nested too deeply"),
        ('{"hidden_size": ' + "9" * 5000 + "}", "is not JSON"),
        ('{"hidden_size": "\\ud800"}', "is not JSON"),
        ("\ufeff[]", "is not a JSON object"),
        ("", "is not JSON"),
    ],
    ids=("objects", "lists", "number", "half", "list", "empty"),
)
@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
def test_json_that_is_none(content, reason, name, source, refusal, tmp_path):
    if name != "config.json":
        (source / "model.safetensors").unlink()
    (source / name).write_text(content)
    assert reason in refusal("convert", source, tmp_path / "out")


@pytest.mark.parametrize(
    "header",
    [
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}},
        {"a": {"dtype": "F32", "shape": [True], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F33", "shape": [1], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}},
        {"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}},
        {name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} for name in "ab"},
        {"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}},
        {"a": [], "b": 1},
        [],
    ],
    ids=("pair", "bool", "dtype", "size", "backwards", "overlap", "beyond", "types", "list"),
)
def test_headers_that_are_none(header, source, refusal, tmp_path):
    with_header(source / "model.safetensors", json.dumps(header).encode(), bytes(4))
    assert "is cut short or not a safetensors file" in refusal("convert", source, tmp_path / "out")


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        ({"a": (0, 4), "b": (4, 12)}, None),
        ({"a": (0, 4), "b": (0, 8)}, "a tensor of 8 bytes lies from 0 to 8, after 4"),
        ({"a": (0, 4), "b": (8, 16)}, "a tensor of 8 bytes lies from 8 to 16, after 4"),
        ({"a": (0, 8), "b": (8, 16)}, "a tensor of 4 bytes lies from 0 to 8, after 0"),
        ({"a": (0, 4), "b": (4,)}, "is not a pair of numbers"),
        ({"a": (False, 4), "b": (4, 12)}, "is not a pair of numbers"),
    ],
)
def test_offsets_of_a_header_from_the_hub(offsets, message):
    tensors = {"a": tensor_info("F32", [1], "x"), "b": tensor_info("BF16", [2, 2], "x")}
    if message is None:
        check_offsets(tensors, offsets, 12)
        message, offsets = "its tensors take 12 bytes, and it has 11", offsets
    with pytest.raises(ValueError, match=message):
        check_offsets(tensors, offsets, 11)


@pytest.mark.parametrize(
    ("dtype", "shape"), [("F33", [1]), (["F32"], [1]), ("F32", [True]), ("F32", "1"), ("F32", [-1])]
)
def test_entries_of_a_header_from_the_hub(dtype, shape):
    with pytest.raises(ValueError, match="a tensor has"):
        tensor_info(dtype, shape, "x")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": ["llama"]}, "has model_type ['llama'], which is not a name"),
        ({"model_type": {"a": 1}}, "has model_type {'a': 1}, which is not a name"),
        ({"architectures": "LlamaForCausalLM"}, "has architectures 'LlamaForCausalLM', not a list of names"),
        ({"architectures": [1]}, "has architectures [1], not a list of names"),
        ({"hidden_size": -32}, "has hidden_size -32, not a size of a model"),
        ({"hidden_size": True}, "has hidden_size True, not a size of a model"),
        ({"hidden_size": 32.0}, "has hidden_size 32.0, not a size of a model"),
        ({"num_hidden_layers": 0}, "has num_hidden_layers 0, not a size of a model"),
        ({"num_hidden_layers": "3"}, "has num_hidden_layers '3', not a size of a model"),
        ({"num_hidden_layers": [3, 3]}, "its layers come in stages"),
        (
            {"transformers_weights": "other.safetensors"},
            "names a weight file of its own (transformers_weights='other.",
        ),
        ({"max_position_embeddings": True}, "Transformers can't load it"),
        ({"rope_parameters": 3}, "Transformers can't load it"),
    ],
)
def test_fields_of_other_types(changes, message, source, tmp_path, capsys):
    assert main(["convert", str(configure(source, **changes)), str(tmp_path / "out")]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert "unexpected" not in line


@pytest.mark.parametrize("digit", ["²", "٣", "9" * 5000])
def test_layers_whose_numbers_are_none(digit, source, tmp_path, capsys):
    name = f"model.layers.{digit}.weight"
    edit_tensors(source / "model.safetensors", lambda tensors: tensors.update({name: torch.ones(32)}))
    assert main(["convert", str(source), str(tmp_path / "out")]) == 1
    assert f"the tensor 'model.layers.{digit}"[:60] in capsys.readouterr().err


def test_an_index_never_leads_to_a_pickle(source, refusal, tmp_path):
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").rename(source / "model.bin")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.bin")}
    (source / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "names 'model.bin', and only files in .safetensors are read" in refusal("convert", source, tmp_path / "out")


def test_an_adapter_beside_the_weights(source, refusal, tmp_path):
    """Transformers would load it, or fail without its weights; a conversion would have neither."""
    (source / "adapter_config.json").write_text("{}")
    message = refusal("convert", source, tmp_path / "out")
    assert "holds an adapter (adapter_config.json) beside its weights" in message


def test_an_adapter_further_in_is_left_behind(source, tmp_path):
    (source / "lora").mkdir()
    (source / "lora" / "adapter_config.json").write_text("{}")
    out = convert_checkpoint(str(source), tmp_path / "out").path
    assert not (out / "lora").exists()


@pytest.mark.parametrize("name", [b"notes\xff.txt", b"sub\xff/notes.txt"])
def test_names_that_are_not_text(name, source, refusal, tmp_path):
    path = os.fsencode(source) + b"/" + name
    os.makedirs(os.path.dirname(path), exist_ok=True)
    with open(path, "w") as file:
        file.write("x")
    assert "is not UTF-8, so it can't be recorded. Rename it." in refusal("convert", source, tmp_path / "out")


def test_arguments_that_are_not_text(source, refusal, tmp_path):
    broken = os.fsdecode(b"out\xff")
    assert "is not UTF-8" in refusal("convert", source, tmp_path / broken)
    source.rename(tmp_path / broken)
    assert "is not UTF-8" in refusal("convert", tmp_path / broken, tmp_path / "out")


@pytest.mark.parametrize("length", [235, 245, 300])
def test_names_that_are_too_long(length, source, refusal, tmp_path):
    message = refusal("convert", source, tmp_path / ("x" * length))
    assert "is too long: folders beside it have names of" in message
    assert message.endswith("Choose another OUT.")
    assert "error: " in refusal("convert", tmp_path / ("x" * length), tmp_path / "out")


def test_a_folder_that_nobody_may_enter(source, tmp_path, monkeypatch):
    """Whoever runs this may be root, whom no permission stops."""
    (source / "locked").mkdir()
    scan = os.scandir

    def scandir(path):
        if Path(path).name == "locked":
            raise PermissionError(13, "Permission denied", str(path))
        return scan(path)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UnsupportedCheckpointError, match="can't read '.*locked': Permission denied. Allow that"):
        LocalSource(source)


def test_files_that_nobody_may_look_at(source, monkeypatch):
    look = Path.stat

    def refuse(self, **keywords):
        if self.name == "config.json":
            raise PermissionError(13, "Permission denied", str(self))
        return look(self, **keywords)

    monkeypatch.setattr(Path, "stat", refuse)
    with pytest.raises(UnsupportedCheckpointError, match="can't read '.*config.json': Permission denied"):
        LocalSource(source)


def test_links_to_nothing_are_no_files(source):
    (source / "nothing").symlink_to("nowhere")
    (source / "itself").symlink_to("itself")
    assert not {"nothing", "itself"} & LocalSource(source).files.keys()


def test_a_readme_that_becomes_a_link_out_is_refused(source, tmp_path):
    """Put there after the plan was made, its text would go into the record and the card."""
    elsewhere = tmp_path / "elsewhere.md"
    for readme in (elsewhere, source / "README.md"):
        readme.write_text("---\nlicense: mit\n---\n", encoding="utf-8")
    plan = plan_conversion(str(source), tmp_path / "out")
    (source / "README.md").unlink()
    (source / "README.md").symlink_to(elsewhere)
    with pytest.raises(UnsupportedCheckpointError, match="README.md' is a link to"):
        carry_out(plan, verify="off")
