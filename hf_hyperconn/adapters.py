"""Which modules compute in a model that PEFT has put copies into (`modules_to_save`)."""

from collections.abc import Iterator
from typing import Any

from torch import nn


def modules_in_use(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """As `named_modules`, without the copies that don't compute; the one that does has the name of PEFT's wrapper."""
    return _walk("", model, set())


def active_copy(module: Any) -> nn.Module:
    """The module that computes, when `module` is PEFT's wrapper for `modules_to_save`."""
    copies = getattr(module, "modules_to_save", None)
    if not isinstance(copies, nn.ModuleDict) or not hasattr(module, "original_module"):
        return module
    active = [] if module.disable_adapters else [name for name in module.active_adapters if name in copies]
    return copies[active[0]] if active else module.original_module


def _walk(path: str, module: nn.Module, seen: set[int]) -> Iterator[tuple[str, nn.Module]]:
    module = active_copy(module)
    if id(module) in seen:
        return
    seen.add(id(module))
    yield path, module
    for name, child in module.named_children():
        yield from _walk(f"{path}.{name}" if path else name, child, seen)
