"""A model's connections in their order, and their observation while it runs.

Observed are the streams, branch inputs and coefficients of each sub-layer.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ..errors import HyperConnError
from ..models.connection import Connection, without_autocast
from ..models.sub_layers import SubLayer
from ..wrappers import modules_in_use, outermost_model

Inputs = torch.Tensor | Mapping[str, torch.Tensor]
"""Inputs of a model: token ids `[B, S]`, or its arguments by name, such as `{"pixel_values": images}`."""


@dataclass(frozen=True)
class Observation:
    """One sub-layer in one forward.

    connection: the connection; offloaded parameters are present while it is observed.
    streams: H before the width connection, `[B, S, N, D]`.
    branch_input: input of the branch, `[B, S, D]`.
    alpha, beta: A `[B, S, N, reads + N]`, reads before mixes, and b `[B, S, N]`, float32.
    place: number of the sub-layer in the model as it is now, from zero.
    has_read: whether its branch reads the streams. Else it adds a value of an earlier branch (Cohere's MLP);
        `branch_input` and the reads are then the earlier branch's.
    """

    connection: Connection
    streams: torch.Tensor
    branch_input: torch.Tensor
    alpha: torch.Tensor
    beta: torch.Tensor
    place: int
    has_read: bool

    @property
    def reads(self) -> torch.Tensor:
        """Return A_m, `[B, S, N, reads]`; frac-connections have N reads, other kinds one."""
        return self.alpha[..., : -self.beta.shape[-1]]

    @property
    def mixes(self) -> torch.Tensor:
        """Return A_r, `[B, S, N, N]`: the weight of stream i in the new stream j."""
        return self.alpha[..., -self.beta.shape[-1] :]

    def at(self, kept: torch.Tensor) -> "Observation":
        """Return the observation `[1, T, ...]` of the T positions where a mask `[B, S]` is true."""
        kept = kept.to(self.beta.device)
        names = ("streams", "branch_input", "alpha", "beta")
        return replace(self, **{name: getattr(self, name)[kept][None] for name in names})


def run_observed(
    model: nn.Module,
    inputs: Inputs,
    see: Callable[[Observation], None],
    stack: str | None = None,
    device: torch.device | None = None,
) -> bool:
    """Run a model once and call `see` for each sub-layer of a stack, in their order.

    Positions where a mask `[B, S]` among the inputs is zero are left out: observations are then `[1, T, ...]` of the T
    others. The mask is `attention_mask`; of an encoder-decoder's decoder, `decoder_attention_mask`.

    stack: "encoder" or "decoder" of an encoder-decoder; None for the decoder.
    device: device to move the inputs to; None to leave them.

    Returns whether there was any position; without one the model is not run. Raises `HyperConnError` for a model
    without streams, and for a mask with padding and another shape than the positions of the stack.
    """
    named = {"input_ids": inputs} if isinstance(inputs, torch.Tensor) else inputs
    part = with_layers(model, stack)
    name = _mask_of(model, part)
    mask = named.get(name)
    kept = None if mask is None or mask.ndim != 2 or bool(mask.all()) else mask != 0
    if kept is not None and not kept.any():
        return False

    def see_kept(seen: Observation) -> None:
        if kept is not None and kept.shape != seen.beta.shape[:-1]:
            raise HyperConnError(
                f"{name} {[*kept.shape]} has padding, but the sub-layers have {[*seen.beta.shape[:-1]]} positions. "
                f"Give inputs without padding, such as one at a time."
            )
        see(seen if kept is None else seen.at(kept))

    settings = {"use_cache": False} if "input_ids" in named else {}
    with observe(part, see_kept):
        model(**{key: value.to(device or value.device) for key, value in named.items()}, **settings)
    return True


@contextmanager
def observe(model: nn.Module, see: Callable[[Observation], None]) -> Iterator[None]:
    """Call `see` for each sub-layer, in their order, in every forward of `model` within this context.

    It works through wrappers (PEFT's, DDP, FSDP). Compiled modules run eagerly. `see` runs without autocast, as do
    connections.

    Raises `HyperConnError` for a model without streams that matrices read and mix, such as a base model.
    """
    connections = connections_of(model)
    if not connections:
        raise HyperConnError(
            f"{type(model).__name__} has no streams that matrices read and mix, so none to observe. Give a model with "
            f"connections of another kind, such as 'dhc'."
        )

    places = {connection: place for place, connection in enumerate(connections.values())}
    copying = without_reads(model)
    reading = {connection for name, connection in connections.items() if name not in copying}
    last: Observation | None = None  # that read

    def record(connection, args, output):
        nonlocal last
        branch_input, carry = output
        streams = carry.streams if hasattr(carry, "streams") else args[0].written()
        with torch.no_grad(), without_autocast(streams), with_parameters(connection):
            alpha, beta = connection.matrices(streams)
            has_read = connection in reading
            seen = Observation(
                connection, streams.detach(), branch_input.detach(), alpha, beta, places[connection], has_read
            )
            if last is not None and not has_read:
                alpha = torch.cat([last.reads.to(alpha.device), seen.mixes], dim=-1)
                seen = replace(seen, branch_input=last.branch_input, alpha=alpha)
            else:
                last = seen
            see(seen)

    handles = [connection.register_forward_hook(record, prepend=True) for connection in places]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Put a model in evaluation mode, and afterwards each of its modules in its former mode."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def with_parameters(connection: nn.Module) -> AbstractContextManager:
    """Return a context in which a connection has its parameters, even if accelerate has offloaded them."""
    if not hasattr(connection, "_hf_hook"):
        return nullcontext()
    from accelerate.utils import align_module_device  # who offloads a model has it

    return align_module_device(connection)


def _mask_of(model: nn.Module, part: nn.Module) -> str:
    """Return the name of the mask of padding for a part of the model."""
    config: Any = getattr(outermost_model(model), "config", None)
    observed = {id(connection) for connection in connections_of(part).values()}
    paths = [name.split(".") for name, connection in connections_of(model).items() if id(connection) in observed]
    of_decoder = getattr(config, "is_encoder_decoder", False) and any("decoder" in path for path in paths)
    return "decoder_attention_mask" if of_decoder else "attention_mask"


def connections_of(model: nn.Module) -> dict[str, Any]:
    """Return the connections whose matrices read and mix streams, by their names, in the order in which they run.

    Of connections in PEFT's `modules_to_save`, this is the active copy, by its wrapper's name.

    Raises `HyperConnError` for a model with one layer in several places, whose sub-layers can't be distinguished.
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
    """Return the sub-layers with attention, counted from zero. In parallel blocks they also have an MLP."""
    names = [name.rpartition(".")[2] for name in connections_of(model)]
    return tuple(place for place, name in enumerate(names) if re.search("attn|attention", name))


def without_reads(model: nn.Module) -> set[str]:
    """Return the names of the connections whose branches add a value of an earlier branch, and read nothing."""
    return {name for name, sub_layer in _sub_layers_of(model).items() if not sub_layer.reads}


def _sub_layers_of(model: nn.Module) -> dict[str, SubLayer]:
    """Return the sub-layers of a model's layers, in their order, by the names of their connections.

    Layers of older code do not name their sub-layers.
    """
    layers: Any = [(path, layer) for path, layer in modules_in_use(model) if hasattr(layer, "make_connection")]
    return {
        f"{path}.{part.connection}" if path else part.connection: part
        for path, layer in layers
        for part in getattr(layer, "parts", ())
    }


def stacks_of(model: Any) -> list[str]:
    """Return the names of an encoder-decoder's stacks, for `with_layers`; none for another model.

    The model may be in a wrapper.
    """
    model = outermost_model(model) or model
    return [*getattr(getattr(model, "base_model", model), "inner", ())]


def with_layers(model: Any, stack: str | None = None) -> Any:
    """Return the part of a model, without its wrapper, with one list of layers; this may be the model itself.

    stack: "encoder" or "decoder" of an encoder-decoder; None for the decoder.

    Raises `HyperConnError` for an unknown stack.
    """
    model = outermost_model(model) or model
    stacks = stacks_of(model)
    if stack is not None and stack not in stacks:
        raise HyperConnError(
            f"stack must be {' or '.join(stacks) or None} in {type(model).__name__} (got {stack!r}). Give another."
        )
    return getattr(getattr(model, "base_model", model), stack or stacks[-1]) if stacks else model
