"""What others have hung on a module."""

from torch import nn

KINDS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def hooks_of(module: nn.Module) -> dict[str, set[str]]:
    """Module and name of the function of each hook, by kind."""
    return {kind: {_name(hook) for hook in getattr(module, kind).values()} for kind in KINDS}


def _name(hook: object) -> str:
    hook = getattr(hook, "hook", hook)  # torch wraps some
    return f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"
