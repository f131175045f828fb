"""Connections of a model, in the order in which they run, and the part of a model that has them."""

import re
from typing import Any

from torch import nn

from ..errors import HyperConnError
from ..models.sub_layers import SubLayer
from ..wrappers import modules_in_use, outermost_model


def connections_of(model: nn.Module) -> dict[str, Any]:
    """Return the connections whose matrices read and mix streams, by their names, in the order in which they run.

    Of connections in PEFT's `modules_to_save`, this is the copy that computes, by its wrapper's name.

    Raises `HyperConnError` for a model with one layer in several places, whose sub-layers can't be told apart.
    """
    modules = {name: module for name, module in modules_in_use(model) if hasattr(type(module), "matrices")}
    connections = {name: modules[name] for name in (*_sub_layers_of(model), *modules) if name in modules}
    for path, layers in model.named_modules():
        has_connections = isinstance(layers, nn.ModuleList) and any(
            name.startswith(f"{path}.") for name in connections
        )
        if has_connections and len({*map(id, layers)}) < len(layers):
            raise HyperConnError(f"{path} has one and the same layer in several places. Give each a copy of its own.")
    return connections


def attention_of(model: nn.Module) -> tuple[int, ...]:
    """Return the sub-layers with attention, in parallel blocks with an MLP beside it, counted from zero."""
    names = [name.rpartition(".")[2] for name in connections_of(model)]
    return tuple(place for place, name in enumerate(names) if re.search("attn|attention", name))


def without_reads(model: nn.Module) -> set[str]:
    """Return the names of the connections whose branches read nothing, but add what one before them has made."""
    return {name for name, sub_layer in _sub_layers_of(model).items() if not sub_layer.reads}


def _sub_layers_of(model: nn.Module) -> dict[str, SubLayer]:
    """Return the sub-layers of a model's layers, in their order, by the names of their connections.

    Layers of older code do not name theirs.
    """
    layers: Any = [(path, layer) for path, layer in modules_in_use(model) if hasattr(layer, "make_connection")]
    return {
        f"{path}.{part.connection}" if path else part.connection: part
        for path, layer in layers
        for part in getattr(layer, "parts", ())
    }


def stacks_of(model: Any) -> list[str]:
    """Return the names of an encoder-decoder's stacks, for `with_layers`; none of another model.

    The model may be in a wrapper.
    """
    model = outermost_model(model) or model
    return [*getattr(getattr(model, "base_model", model), "inner", ())]


def with_layers(model: Any, stack: str | None = None) -> Any:
    """Return the part of a model, without its wrapper, that has one list of layers, which may be all of it.

    stack: of an encoder-decoder "encoder" or "decoder"; None for the decoder.

    Raises `HyperConnError` for a stack that it doesn't have.
    """
    model = outermost_model(model) or model
    stacks = stacks_of(model)
    if stack is not None and stack not in stacks:
        raise HyperConnError(
            f"stack {stack!r} was asked for; {type(model).__name__} has {', '.join(stacks) or 'one list of layers'}."
        )
    return getattr(getattr(model, "base_model", model), stack or stacks[-1]) if stacks else model
