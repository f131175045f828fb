"""Refusals of a base: by code that it names, by packed weights, and by a loading fault of Transformers."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hf_hyperconn.errors import UnsupportedCheckpointError

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.checkpoint_files import Weights
from ..checkpoint.source import CONFIG, Source

if TYPE_CHECKING:
    from ..checkpoint.loading import LoadingFault

IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")

QUANTIZATION_FIELDS = ("quantization_config", "compression_config")
# files of other programs beside config.json that tell of a quantization
QUANTIZATION_FILES = ("hf_quant_config.json", "quantize_config.json", "quant_config.json")
NOT_PACKED = ("F64", "F32", "F16", "BF16", "C64", "BOOL", "I64", "U64")
SCALES = ("scale", "absmax", "quant_map", "qzeros", "scb", "zero_point")

LOAD_REMEDY = (
    "Load it with Transformers to see its fault: a checkpoint that Transformers can't load is not read here, either."
)
REMEDIES = {
    "missing": f"Copy or download it again, or name in {CONFIG} the class that was saved (architectures).",
    "unknown": "If the model doesn't need that tensor, load it with Transformers, save it with save_pretrained, "
    "which leaves the tensor out, and convert the result.",
    "refused": LOAD_REMEDY,
}
# additions of torch.compile, FSDP, activation checkpointing, PEFT and DDP to the names of tensors
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "base_model.model.", "module.")


def refuse_own_code(source: Source, config: dict) -> None:
    """Refuse a config that names code of its own, or a kernel on the Hub. Neither is run or copied.

    Raises `UnsupportedCheckpointError`.
    """
    if "auto_map" in config:
        raise UnsupportedCheckpointError(
            f"{source.name!r} brings code of its own (auto_map), which is not run. {_without_it(config['model_type'])}"
        )
    if kernel := _kernel_of(config):
        raise UnsupportedCheckpointError(
            f"{CONFIG} of {source.name!r} has {kernel}, which is code on the Hub that would run when the model is "
            f"loaded. Remove that from {CONFIG}, or convert a checkpoint without it."
        )


def _without_it(model_type: str) -> str:
    """Return the remedy for a checkpoint with code of its own."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return f"Transformers has no {model_type} of its own, so it can't be converted."
    return (
        f"Transformers has a {model_type} of its own. If that is the same model, remove auto_map from {CONFIG} of a "
        f"copy, and convert the copy."
    )


def _nested(config: dict) -> Iterator[tuple[str, dict]]:
    """Yield a config and its inner configs, outer ones first, each after its path such as `text_config.`."""
    pending = [("", config)]
    while pending:
        path, part = pending.pop(0)
        yield path, part
        pending += [(f"{path}{field}.", value) for field, value in part.items() if isinstance(value, dict)]


def _kernel_of(config: dict) -> str | None:
    """Find a kernel on the Hub that a config, or an inner config, names for attention or experts."""
    for _, part in _nested(config):
        for field, value in part.items():
            names = list(value.values()) if isinstance(value, dict) else [value]
            kernel = next((name for name in names if isinstance(name, str) and "/" in name), None)
            if field.removeprefix("_") in IMPLEMENTATIONS and kernel is not None:
                return f"{field} {kernel!r:.60}"
    return None


def refuse_quantized(source: Source, config: dict, weights: Weights | None = None) -> None:
    """Refuse a checkpoint whose config declares a quantization, or whose matrices are packed.

    config: config.json.
    weights: the weights; None before they are read.

    Raises `UnsupportedCheckpointError`.
    """
    if quantization := _quantization(source, config, weights):
        raise UnsupportedCheckpointError(
            f"{source.name!r} is quantized ({quantization}); convert the full-precision checkpoint instead."
        )


def _quantization(source: Source, config: dict, weights: Weights | None) -> str | None:
    for path, part in _nested(config):
        for field in QUANTIZATION_FIELDS:
            if (declared := part.get(field)) is not None:
                method = f"quant_method={declared.get('quant_method') if isinstance(declared, dict) else None}"
                return method if path + field == QUANTIZATION_FIELDS[0] else f"{path}{field}, {method}"
    if weights is None or (packed := packed_tensor(weights)) is None:
        return None
    file = next((f", {name}" for name in QUANTIZATION_FILES if name in source.files), "")
    return f"{packed} is {weights.tensors[packed].dtype} with scales beside it{file}"


def packed_tensor(weights: Weights) -> str | None:
    """Find the first matrix that is stored in few bits, with its scales beside it or under its name.

    Matrices in float8 without scales are not packed. Nor are matrices beside a scale in the same float8, which was
    cast with them.
    """
    inside: dict[str, list[str]] = {}
    for name in weights.tensors:
        inside.setdefault(name.rpartition(".")[0], []).append(name)
    for name, tensor in weights.tensors.items():
        if tensor.dtype in NOT_PACKED or len(tensor.shape) < 2:
            continue
        for other in (*inside[name.rpartition(".")[0]], *inside.get(name, ())):
            is_cast = tensor.dtype.startswith("F8") and weights.tensors[other].dtype == tensor.dtype
            own = other.rpartition(".")[2].lower()
            if other != name and not is_cast and any(word in own for word in SCALES):
                return name
    return None


def refuse_unfit(base: Checkpoint, because: str = "") -> None:
    """Refuse a base that Transformers would not load in full, with all of its tensors.

    because: a known fault, shown before Transformers' own.

    Raises `UnsupportedCheckpointError`.
    """
    from ..checkpoint.loading import fault_by_headers  # with torch

    if fault := fault_by_headers(base):
        raise UnsupportedCheckpointError(
            f"the weights of {base.name!r} do not fit its {CONFIG}: {because}{fault}. {_remedy(fault, base)}"
        )


def _remedy(fault: "LoadingFault", base: Checkpoint) -> str:
    if fault.kind == "missing" and (wrapper := _wrapper(base)):
        return f"A wrapper put {wrapper!r} into the names. Take that off, and convert the result."
    return REMEDIES.get(fault.kind, "Copy or download it again.")


def _wrapper(base: Checkpoint) -> str | None:
    """Find a wrapper's addition to the names of tensors, without which the base can be loaded."""
    from ..checkpoint.loading import fault_by_headers

    stored = base.weights.tensors
    for wrapper in WRAPPERS:
        tensors = {name.removeprefix(wrapper).replace(f".{wrapper}", "."): stored[name] for name in stored}
        is_put = tensors.keys() != stored.keys() and len(tensors) == len(stored)
        if is_put and fault_by_headers(base, tensors) is None:
            return wrapper
    return None
