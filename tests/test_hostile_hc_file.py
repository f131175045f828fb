"""Files of hyper-connections that no `save_hc` wrote: refused as such, quickly, before anything is made of them."""

import json
import os
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_hyperconn import convert_model, load_hc, save_hc
from hf_hyperconn.errors import HyperConnectionFileError
from hf_hyperconn.training import hc_file

from .conftest import hc_llama

SAVED = {
    "model_type": "hc_llama",
    "connection": "dhc",
    "hc_mult": 4,
    "hc_tanh": True,
    "hc_readout": "mean",
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "norm": None,
    "norm_alpha_attention": None,
    "norm_alpha_other": None,
}


@pytest.fixture
def write(llama, tmp_path):
    """A function that writes a file with metadata, which change those of a good one, and tensors."""
    tensors = load_file(save_hc(convert_model(llama), tmp_path / "good.safetensors"))

    def written(metadata, tensors=tensors):
        text = metadata if isinstance(metadata, str) else json.dumps({**SAVED, **metadata})
        save_file(tensors, tmp_path / "bad.safetensors", {"hyper_connections": text})
        return tmp_path / "bad.safetensors"

    return written


def assert_refused(file, llama, message):
    """Load a file into a base and into a conversion, and expect its refusal."""
    start = time.monotonic()
    for model in (llama, hc_llama()):
        with pytest.raises(HyperConnectionFileError, match=message):
            load_hc(model, file)
    assert time.monotonic() - start < 5


def test_the_metadata_here_is_what_save_hc_writes(write, llama):
    load_hc(llama, write({}))


WRONG = {
    "hc_mult": [20000, 10**30, 0, -1, "4", 4.0, True, None, [4], {}],
    "hc_tanh": [1, "true", None],
    "hc_readout": ["max", 1, None, ["mean"]],
    "connection": ["mHC", 3, None, {"dhc": 1}],
    "hc_sinkhorn_iters": [10**9, 0, 2.5, "20", False],
    "hc_eps": ["1e-6", None, True, []],
    "norm": ["rms", 0],
    "norm_alpha_other": ["1", True],
    "model_type": [None, 3, ["hc_llama"]],
    "hidden_size": [4],
    "auto_map": [{"AutoModel": "evil--code.Model"}],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_fields_of_another_type_or_range(name, value, write, llama):
    assert_refused(write({name: value}), llama, rf"says '{name}': .*; accepted .* Give load_hc what save_hc returned")


@pytest.mark.parametrize("fields", [{"hc_mult": 1000}, {"hc_mult": 5, "connection": "mhc"}, {"hc_mult": 2}], ids=str)
def test_another_number_of_streams_than_the_tensors_show(fields, write, llama):
    tensors = {"layers.0.attn_hc.base": torch.zeros(24)}
    tensors = tensors if "connection" in fields else {"layers.0.attn_hc.static_beta": torch.zeros(4)}
    assert_refused(write(fields, tensors), llama, "contradicts itself: hc_mult is")
    assert_refused(write(fields, {"x": torch.zeros(4)}), llama, "contradicts itself: hc_mult is .* no connections")


def test_shapes_are_compared_before_connections_take_memory(write, llama, monkeypatch):
    """A base would first get connections of this many streams, and then be found to be another."""

    def forbidden(*args):
        raise AssertionError("memory was taken")

    tensors = {
        f"model.layers.{i}.{name}.static_beta": torch.ones(1000) for i in range(3) for name in ("attn_hc", "mlp_hc")
    }
    file = write({"hc_mult": 1000}, tensors)
    monkeypatch.setattr("hf_hyperconn.models.connection_weights.init.copy_", forbidden)
    with pytest.raises(HyperConnectionFileError, match="belongs to another model: the file has no"):
        load_hc(llama, file)


@pytest.mark.parametrize("fields", [{"connection": "keel", "hc_mult": 1}, {"norm": "dyt"}, {"hc_eps": 2.0}], ids=str)
def test_fields_that_no_conversion_has(fields, write, llama):
    tensors = {"layers.0.attn_hc.static_beta": torch.zeros(fields.get("hc_mult", 4))}
    if "hc_eps" in fields:
        fields, tensors = {**fields, "connection": "mhc"}, {"layers.0.attn_hc.base": torch.zeros(24)}
    with pytest.raises(HyperConnectionFileError, match="no hyper-connections can be built as"):
        load_hc(llama, write(fields, tensors))


NO_JSON, NO_METADATA = "can't be read as a safetensors file", "was not written by save_hc"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        pytest.param("[" * 100_000, NO_JSON, id="deep"),
        pytest.param('{"hc_eps": NaN}', NO_JSON, id="nan"),
        pytest.param('{"hc_eps": -Infinity}', NO_JSON, id="infinite"),
        pytest.param('{"hc_mult": ' + "9" * 5000 + "}", NO_JSON, id="long"),
        ("{", NO_JSON),
        ("", NO_JSON),
        *((metadata, NO_METADATA) for metadata in ("3", "null", "[]", '"text"')),
        (json.dumps(SAVED).replace("1e-06", "1e999"), "'hc_eps': inf; accepted is a finite"),
    ],
)
def test_metadata_that_save_hc_did_not_write(metadata, message, write, llama):
    assert_refused(write(metadata), llama, message)


def test_whole_numbers_in_the_place_of_tensors_of_reals(write, llama):
    tensors = {name: torch.zeros(4, dtype=torch.int64) for name in ("a.static_beta", "b.static_beta")}
    assert_refused(write({}, tensors), llama, "has tensors of dtype I64; accepted are F64, F32, F16, BF16")


def test_a_header_larger_than_any_model_needs(llama, tmp_path):
    file = tmp_path / "large.safetensors"
    with file.open("wb") as opened:
        opened.write((2_200_000_000).to_bytes(8, "little"))
        opened.truncate(2_300_000_000)
    assert_refused(file, llama, f"its header has 2200000000 bytes, at most {hc_file.MAX_HEADER} are accepted")


def test_special_files(llama, tmp_path):
    os.mkfifo(tmp_path / "pipe.safetensors")
    (tmp_path / "link.safetensors").symlink_to("/dev/zero")
    (tmp_path / "folder.safetensors").mkdir()
    for name in ("pipe", "link", "folder"):
        assert_refused(tmp_path / f"{name}.safetensors", llama, "it is not a regular file")
    (tmp_path / "empty.safetensors").touch()
    assert_refused(tmp_path / "empty.safetensors", llama, "can't be read as a safetensors file")


def test_what_the_library_says_of_a_name_drives_no_terminal(llama, tmp_path):
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}
    header = json.dumps({"\x1b[31mred": entry}, ensure_ascii=False).encode()
    file = tmp_path / "red.safetensors"
    file.write_bytes(len(header).to_bytes(8, "little") + header)
    with pytest.raises(HyperConnectionFileError) as refusal:
        load_hc(llama, file)
    assert str(refusal.value).isprintable()
