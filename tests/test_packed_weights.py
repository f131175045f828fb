"""Quantized bases are refused in every mode, by what a config declares or by the headers of their weights."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from hf_hyperconn.conversion.checkpoint.checkpoint_files import Weights
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.files.reading import TensorInfo
from hf_hyperconn.conversion.planning.base_refusals import packed_tensor
from hf_hyperconn.errors import UnsupportedCheckpointError

FLOAT8 = torch.float8_e4m3fn


def repack(folder: Path, pack) -> None:
    """Store every projection as `pack` says, by what comes after its module's name."""
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        weight = tensors.pop(name)
        tensors |= {name.removesuffix("weight") + suffix: value for suffix, value in pack(weight).items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


def uint8(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.uint8)


PACKED = {
    "ModelOpt FP8": (
        lambda w: {
            "weight": w.to(FLOAT8),
            "weight_scale": torch.tensor(0.5),
            "input_scale": torch.tensor(0.5),
        },
        "hf_quant_config.json",
        "F8_E4M3",
    ),
    "ModelOpt NVFP4": (
        lambda w: {"weight": uint8(len(w), w.shape[1] // 2), "weight_scale": torch.ones(len(w), 2).to(FLOAT8)},
        "hf_quant_config.json",
        "U8",
    ),
    "GPTQ": (
        lambda w: {"qweight": int32(w.shape[1] // 8, len(w)), "qzeros": int32(1, 4), "scales": torch.ones(1, len(w))},
        "quantize_config.json",
        "I32",
    ),
    "FP8 in blocks": (lambda w: {"weight": w.to(FLOAT8), "weight_scale_inv": torch.ones(1, 1)}, None, "F8_E4M3"),
    "compressed-tensors": (lambda w: {"weight_packed": int32(len(w), 4), "weight_scale": torch.ones(1)}, None, "I32"),
    "bitsandbytes, 4 bits": (
        lambda w: {"weight": uint8(w.numel() // 2, 1), "weight.absmax": torch.ones(4)},
        None,
        "U8",
    ),
    "bitsandbytes, 8 bits": (lambda w: {"weight": w.to(torch.int8), "SCB": torch.ones(len(w))}, None, "I8"),
    "torchao": (lambda w: {"_weight_qdata": w.to(torch.int8), "_weight_scale": torch.ones(len(w), 1)}, None, "I8"),
    "quanto": (lambda w: {"weight._data": w.to(torch.int8), "weight._scale": torch.ones(len(w), 1)}, None, "I8"),
}


@pytest.mark.parametrize("verify", ["off", "structure"])
@pytest.mark.parametrize("method", PACKED)
def test_headers_tell(method, verify, source, tmp_path):
    pack, file, dtype = PACKED[method]
    repack(source, pack)
    if file:
        (source / file).write_text(json.dumps({"quantization": {}}))
    told = f", {file}" if file else ""
    with pytest.raises(UnsupportedCheckpointError, match=rf"\(\S+ is {dtype} with scales beside it{told}\)"):
        convert_checkpoint(str(source), tmp_path / "out", verify=verify)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"quantization_config": {"quant_method": "awq"}}, r"quant_method=awq"),
        ({"compression_config": {"quant_method": "x"}}, r"compression_config, quant_method=x"),
        (
            {"text_config": {"quantization_config": {"quant_method": "x"}}},
            r"text_config.quantization_config, q",
        ),
        ({"a": {"b": {"compression_config": "?"}}}, r"a.b.compression_config, quant_method=None"),
    ],
)
def test_configs_tell_wherever_they_say_so(fields, told, source, tmp_path):
    path = source / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))
    with pytest.raises(UnsupportedCheckpointError, match=rf"is quantized \({told}"):
        convert_checkpoint(str(source), tmp_path / "out", verify="off")


def test_float8_without_scales_and_masks_are_weights_as_others(source, tmp_path):
    repack(source, lambda w: {"weight": w.to(FLOAT8)})
    path, file = source / "config.json", source / "model.safetensors"
    path.write_text(json.dumps({**json.loads(path.read_text()), "dtype": "bfloat16"}))
    rotary = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**load_file(file), **rotary}, file, metadata={"format": "pt"})
    report = convert_checkpoint(str(source), tmp_path / "out", verify="full").verification
    assert report.passed
    assert all(comparison.equal for comparison in report.comparisons)


def test_parameters_that_are_called_scale():
    """In a module without a matrix, or cast to float8 as everything was; and a mask of bytes without any scale."""
    forms = {
        "h.0.norm.scale": ("F8_E4M3", (8,)),
        "h.0.norm.bias": ("F8_E4M3", (8,)),
        "h.0.attn.weight": ("F8_E4M3", (8, 8)),
        "h.0.gate.weight": ("F8_E4M3", (8, 8)),
        "h.0.gate.global_scale": ("F8_E4M3", (1,)),
        "h.0.attn.bias": ("U8", (1, 1, 8, 8)),
        "h.0.attn.masked_bias": ("F32", ()),
        "swin.relative_position_index": ("I64", (8, 8)),
        "swin.logit_scale": ("F32", (4, 1, 1)),
    }
    weights = Weights(("a",), {name: TensorInfo(*form, 0, "a") for name, form in forms.items()})
    assert packed_tensor(weights) is None
