"""Whether weights are quantised, by what a config declares and by what the headers hold."""

from collections.abc import Iterator

from .checkpoint import Weights
from .source import Source

DECLARED = ("quantization_config", "compression_config")
# where other programs say how they have quantised, beside config.json
ELSEWHERE = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
FLOATS = ("F64", "F32", "F16", "BF16", "C64")
NOT_PACKED = (*FLOATS, "BOOL", "I64", "U64")
OF_PACKED = ("scale", "absmax", "quant_map", "qzeros", "scb", "zero_point")


def quantisation(source: Source, config: dict, weights: Weights | None = None) -> str | None:
    """How a checkpoint is quantised, for people; None when nothing says so.

    config: as it is written. weights: None where they are not read yet.
    """
    for path, declared in _declared(config):
        method = declared.get("quant_method") if isinstance(declared, dict) else None
        return f"quant_method={method}" if path == DECLARED[0] else f"{path}, quant_method={method}"
    if weights is None or (packed := packed_tensor(weights)) is None:
        return None
    told = next((f", {name}" for name in ELSEWHERE if name in source.files), "")
    return f"{packed} is {weights.tensors[packed].dtype} with scales beside it{told}"


def packed_tensor(weights: Weights) -> str | None:
    """The first matrix that is stored in few bits, with what turns it back into numbers beside it or under its name.

    Matrices in float8 without scales are numbers themselves.
    """
    beside: dict[str, list[str]] = {}
    for name in weights.tensors:
        parent, _, own = name.rpartition(".")
        beside.setdefault(parent, []).append(own.lower())
    for name, tensor in weights.tensors.items():
        if tensor.dtype in NOT_PACKED or len(tensor.shape) < 2:
            continue
        parent, _, own = name.rpartition(".")
        others = [each for each in beside[parent] if each != own.lower()] + beside.get(name, [])
        if any(word in each for each in others for word in OF_PACKED):
            return name
    return None


def _declared(config: dict) -> Iterator[tuple[str, object]]:
    """Where a config, or one in it, declares a quantisation, and what it says; its own before those in it."""
    pending: list[tuple[str, dict]] = [("", config)]
    while pending:
        where, part = pending.pop(0)
        for field in DECLARED:
            if part.get(field) is not None:
                yield f"{where}{field}", part[field]
        pending += [(f"{where}{field}.", value) for field, value in part.items() if isinstance(value, dict)]
