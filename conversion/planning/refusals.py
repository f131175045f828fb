"""Code that a base brings or names in its config.json, which is neither run nor copied."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hf_hyperconn.errors import UnsupportedCheckpointError

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.checkpoint_files import Weights
from ..checkpoint.source import CONFIG, Source

IMPLEMENTATIONS = ("attn_implementation", "experts_implementation")


def refuse_own_code(source: Source, config: dict) -> None:
    """Refuse a config that names classes of its own, or a kernel on the Hub.

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
    """What to do with a checkpoint that brings code of its own."""
    from transformers import CONFIG_MAPPING

    if model_type not in CONFIG_MAPPING:
        return f"Transformers has no {model_type} of its own, so it can't be converted."
    return (
        f"Transformers has a {model_type} of its own. If that is the same model, remove auto_map from {CONFIG} of a "
        f"copy, and convert the copy."
    )


def _kernel_of(config: dict) -> str | None:
    """A kernel on the Hub that a config, or one in it, names as its implementation of attention or experts."""
    configs = [config]
    while configs:
        for field, value in configs.pop().items():
            names = list(value.values()) if isinstance(value, dict) else [value]
            kernel = next((name for name in names if isinstance(name, str) and "/" in name), None)
            if field.removeprefix("_") in IMPLEMENTATIONS and kernel is not None:
                return f"{field} {kernel!r:.60}"
            if isinstance(value, dict):
                configs.append(value)
    return None


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


if TYPE_CHECKING:
    from ..checkpoint.loading import LoadingFault

AGAIN = "Copy or download it again."
LOAD_IT = "Load it with Transformers to see what it lacks: what that can't load is not read here, either."
# what torch.compile, FSDP, activation checkpointing, PEFT and DDP put into the names of tensors
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "base_model.model.", "module.")


def refuse_unfit(base: Checkpoint, because: str = "") -> None:
    """Refuse a base that Transformers would not load in full, and from all of its tensors.

    because: what is known of the fault already, to be read before it.

    Raises `UnsupportedCheckpointError`.
    """
    from ..checkpoint.loading import fault_by_headers  # with torch

    if found := fault_by_headers(base):
        raise UnsupportedCheckpointError(
            f"the weights of {base.name!r} are not those of its {CONFIG}: {because}{found}. {_remedy(found, base)}"
        )


def _remedy(found: "LoadingFault", base: Checkpoint) -> str:
    match found.kind:
        case "missing":
            if wrapper := _wrapper(base):
                return f"A wrapper put {wrapper!r} into the names. Take that off, and convert the result."
            return f"Copy or download it again, or name in {CONFIG} the class that was saved (architectures)."
        case "unknown":
            return (
                "If the model doesn't need that tensor, load it with Transformers, save it with save_pretrained, "
                "which leaves the tensor out, and convert the result."
            )
        case "refused":
            return LOAD_IT
    return AGAIN


def _wrapper(base: Checkpoint) -> str | None:
    """What wrappers put into the names of tensors, if they are those of the config without it."""
    from ..checkpoint.loading import fault_by_headers

    stored = base.weights.tensors
    for wrapper in WRAPPERS:
        tensors = {_without(wrapper, name): tensor for name, tensor in stored.items()}
        is_put = tensors.keys() != stored.keys() and len(tensors) == len(stored)
        if is_put and fault_by_headers(base, tensors) is None:
            return wrapper
    return None


def _without(wrapper: str, name: str) -> str:
    """A name without what a wrapper put before it, or into it after a dot."""
    return name.removeprefix(wrapper).replace(f".{wrapper}", ".")
