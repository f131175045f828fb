"""A model within wrappers: the model of Transformers or diffusers, PEFT's active copies, hooks."""

import sys
from collections.abc import Iterator
from typing import Any

from torch import nn
from transformers import PreTrainedModel

HOOKS = (
    "_forward_hooks",
    "_forward_pre_hooks",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)


def is_of_diffusers(model: object) -> bool:
    """Tell whether an object is a model of diffusers, without importing diffusers."""
    modeling = sys.modules.get("diffusers.models.modeling_utils")
    return modeling is not None and isinstance(model, modeling.ModelMixin)


def outermost_model(model: nn.Module) -> nn.Module | None:
    """Return the outermost model of Transformers or diffusers in a module; None without any."""
    return next(
        (module for module in model.modules() if isinstance(module, PreTrainedModel) or is_of_diffusers(module)), None
    )


def config_of(model: nn.Module):
    """Return the config of a model; for diffusers, whose own is a mapping, the hyper-connections' config."""
    return getattr(model, "hc_config", model.config)


def connection_config(config: Any) -> Any:
    """Return the config with the fields of connections: this one, or the config of the inner model in it."""
    return getattr(config, getattr(config, "part_field", ""), config)


def modules_in_use(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield `named_modules` without inactive copies; the active copy has the name of PEFT's wrapper."""
    return _walk("", model, set())


def active_copy(module: Any) -> nn.Module:
    """Return the active module within PEFT's wrapper for `modules_to_save`; else the module itself."""
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict) or not hasattr(module, "original_module"):
        return module
    active = [] if module.disable_adapters else [name for name in module.active_adapters if name in copies]
    return copies[active[0]] if active else module.original_module


def hooks_of(module: nn.Module) -> dict[str, set[str]]:
    """Return module and name of the function of each hook, by kind."""
    return {kind: {_name(hook) for hook in getattr(module, kind).values()} for kind in HOOKS}


def _name(hook: object) -> str:
    hook = getattr(hook, "hook", hook)  # torch wraps some
    return f"{getattr(hook, '__module__', '')}.{getattr(hook, '__qualname__', type(hook).__qualname__)}"


def _walk(path: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    module = active_copy(module)
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    for name, child in module.named_children():
        yield from _walk(f"{path}.{name}" if path else name, child, seen)
