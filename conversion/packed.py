"""Whether weights are quantized, by what a config declares and by what the headers hold."""

from collections.abc import Iterator

from .checkpoint_files import Weights
from .source import Source

DECLARED = ("quantization_config", "compression_config")
# where other programs say how they have quantized, beside config.json
ELSEWHERE = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
FLOATS = ("F64", "F32", "F16", "BF16", "C64")
NOT_PACKED = (*FLOATS, "BOOL", "I64", "U64")
OF_PACKED = ("scale", "absmax", "quant_map", "qzeros", "scb", "zero_point")


def quantization(source: Source, config: dict, weights: Weights | None = None) -> str | None:
    """How a checkpoint is quantized, for people; None when nothing says so.

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

    Matrices in float8 without scales are numbers themselves. So are those beside a scale in the same float8, which was
    cast with them.
    """
    inside: dict[str, list[str]] = {}
    for name in weights.tensors:
        inside.setdefault(name.rpartition(".")[0], []).append(name)
    for name, tensor in weights.tensors.items():
        if tensor.dtype in NOT_PACKED or len(tensor.shape) < 2:
            continue
        others = (each for each in (*inside[name.rpartition(".")[0]], *inside.get(name, ())) if each != name)
        if any(_turns_back(each, weights, tensor.dtype) for each in others):
            return name
    return None


def _turns_back(name: str, weights: Weights, packed: str) -> bool:
    is_cast = packed.startswith("F8") and weights.tensors[name].dtype == packed
    own = name.rpartition(".")[2].lower()
    return not is_cast and any(word in own for word in OF_PACKED)


def _declared(config: dict) -> Iterator[tuple[str, object]]:
    """Where a config, or one in it, declares a quantization, and what it says; its own before those in it."""
    pending: list[tuple[str, dict]] = [("", config)]
    while pending:
        where, part = pending.pop(0)
        for field in DECLARED:
            if part.get(field) is not None:
                yield f"{where}{field}", part[field]
        pending += [(f"{where}{field}.", value) for field, value in part.items() if isinstance(value, dict)]
