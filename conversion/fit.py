"""A base whose weights are not those of its config is refused, with what helps."""

from typing import TYPE_CHECKING

from hf_hyperconn.errors import UnsupportedCheckpointError

from .checkpoint import Checkpoint
from .source import CONFIG

if TYPE_CHECKING:
    from .loading import LoadingFault

AGAIN = "Copy or download it again."
LOAD_IT = "Load it with Transformers to see what it lacks: what that can't load is not read here, either."
# what torch.compile, FSDP, activation checkpointing, PEFT and DDP put into the names of tensors
WRAPPERS = ("_orig_mod.", "_fsdp_wrapped_module.", "_checkpoint_wrapped_module.", "base_model.model.", "module.")


def refuse_unfit(base: Checkpoint, because: str = "") -> None:
    """Refuse a base that Transformers would not load in full, and from all of its tensors.

    because: what is known of the fault already, to be read before it.

    Raises `UnsupportedCheckpointError`.
    """
    from .loading import fault_by_headers  # with torch

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
    from .loading import fault_by_headers

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
