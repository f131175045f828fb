"""What the hyper-connections of a model do while it runs."""

import random
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import Trainer

from ..errors import HyperConnError
from ..models.connection import Connection, without_autocast
from ..models.sub_layers import SubLayer
from ..wrappers import modules_in_use, outermost_model

Inputs = torch.Tensor | Mapping[str, torch.Tensor]
"""What a model is run on: token ids `[B, S]`, or what it takes by name, such as `{"pixel_values": images}`."""


@dataclass(frozen=True)
class Observation:
    """One sub-layer in one forward.

    connection: around it; its parameters are all there while it is observed.
    streams: H as the width connection reads it, `[B, S, N, D]`.
    branch_input: what the branch reads of it, `[B, S, D]`.
    alpha, beta: A `[B, S, N, reads + N]`, reads before mixes, and b `[B, S, N]`, float32.
    place: among the sub-layers of the model as it is, from zero.
    has_read: whether its branch reads the streams. Where it adds what a branch before it has made (Cohere's MLP),
        `branch_input` and the reads are that one's.
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
        """A_m, `[B, S, N, reads]`; frac-connections have N reads, the others one."""
        return self.alpha[..., : -self.beta.shape[-1]]

    @property
    def mixes(self) -> torch.Tensor:
        """A_r, `[B, S, N, N]`: the weight of stream i in the new stream j."""
        return self.alpha[..., -self.beta.shape[-1] :]

    def at(self, kept: torch.Tensor) -> "Observation":
        """Of the T positions alone that a mask `[B, S]` is true for, `[1, T, ...]`."""
        kept = kept.to(self.beta.device)
        names = ("streams", "branch_input", "alpha", "beta")
        return replace(self, **{name: getattr(self, name)[kept][None] for name in names})


def number_of_sub_layers(model: nn.Module) -> int:
    """How many sub-layers a model with streams has; 0 for another model."""
    return len(connections_of(model))


def connections_of(model: nn.Module) -> dict[str, Any]:
    """The connections whose matrices read and mix streams, by their names in a model, in the order in which they run.

    Of connections in PEFT's `modules_to_save`, the copy that computes, by its wrapper's name.

    Raises `HyperConnError` for a model with one layer in several places, whose sub-layers can't be told apart.
    """
    found = {name: module for name, module in modules_in_use(model) if hasattr(type(module), "matrices")}
    found = {name: found[name] for name in (*_parts_of(model), *found) if name in found}
    for path, layers in model.named_modules():
        has_connections = isinstance(layers, nn.ModuleList) and any(name.startswith(f"{path}.") for name in found)
        if has_connections and len({*map(id, layers)}) < len(layers):
            raise HyperConnError(f"{path} has one and the same layer in several places. Give each a copy of its own.")
    return found


def watch(
    model: nn.Module,
    inputs: Inputs,
    see: Callable[[Observation], None],
    stack: str | None = None,
    device: torch.device | None = None,
) -> bool:
    """Run a model once, its outputs unused, and call `see` for each sub-layer of a stack, in their order.

    A mask `[B, S]` among the inputs (`attention_mask`, of an encoder-decoder's decoder `decoder_attention_mask`) that
    is zero somewhere leaves positions out: what is seen is then `[1, T, ...]` of the T others.

    stack: of an encoder-decoder "encoder" or "decoder"; None for the decoder.
    device: where the inputs are brought; None to leave them where they are.

    Returns whether there was any position; without one the model is not run. Raises `HyperConnError` for a model
    without streams, or when a mask with padding has another shape than the positions of the stack.
    """
    named = {"input_ids": inputs} if isinstance(inputs, torch.Tensor) else inputs
    part = with_layers(model, stack)
    name = _mask_of(model, part)
    kept = _kept(named.get(name))
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


def _parts_of(model: nn.Module) -> dict[str, SubLayer]:
    """The sub-layers of a model's layers, in their order, by the names of their connections.

    Layers of older code do not say theirs.
    """
    layers: Any = [(path, layer) for path, layer in modules_in_use(model) if hasattr(layer, "make_connection")]
    return {
        f"{path}.{part.connection}" if path else part.connection: part
        for path, layer in layers
        for part in getattr(layer, "parts", ())
    }


def attention_of(model: nn.Module) -> tuple[int, ...]:
    """Which sub-layers have attention, in parallel blocks with an MLP beside it; counted from zero."""
    names = [name.rpartition(".")[2] for name in connections_of(model)]
    return tuple(place for place, name in enumerate(names) if re.search("attn|attention", name))


def without_reads(model: nn.Module) -> set[str]:
    """The names of the connections whose branches add what one before them has made, and read nothing themselves."""
    return {name for name, part in _parts_of(model).items() if not part.reads}


def stacks_of(model: Any) -> list[str]:
    """The names of an encoder-decoder's lists of layers, for `with_layers`; of another model none.

    The model may be in a wrapper.
    """
    model = outermost_model(model) or model
    return [*getattr(getattr(model, "base_model", model), "inner", ())]


def with_layers(model: Any, stack: str | None = None) -> Any:
    """The part of a model, without its wrapper, that has one list of layers, which may be all of it.

    stack: of an encoder-decoder "encoder" or "decoder"; None for the decoder.

    Raises `HyperConnError` for a stack that it doesn't have.
    """
    model = outermost_model(model) or model
    base = getattr(model, "base_model", model)
    inner = stacks_of(model)
    if stack is not None and stack not in inner:
        raise HyperConnError(
            f"stack {stack!r} was asked for; {type(model).__name__} has {', '.join(inner) or 'one list of layers'}."
        )
    return getattr(base, stack or inner[-1]) if inner else model


@contextmanager
def observe(model: nn.Module, see: Callable[[Observation], None]) -> Iterator[None]:
    """Within it, every forward of `model` calls `see` for each sub-layer, in their order.

    Works through wrappers (PEFT's, DDP, FSDP). What is compiled runs eagerly within it, and `see` without autocast, as
    connections do.

    Raises `HyperConnError` for a model without streams that matrices read and mix, such as a base model.
    """
    connections = connections_of(model)
    if not connections:
        raise HyperConnError(f"{type(model).__name__} has no streams that matrices read and mix, so none to observe.")

    copying = without_reads(model)
    known = {each: (place, name not in copying) for place, (name, each) in enumerate(connections.items())}
    last: Observation | None = None  # that read

    def record(connection, args, output):
        nonlocal last
        branch_input, carry = output
        streams = carry.streams if hasattr(carry, "streams") else args[0].written()
        with torch.no_grad(), without_autocast(streams), with_parameters(connection):
            alpha, beta = connection.matrices(streams)
            place, has_read = known[connection]
            seen = Observation(connection, streams.detach(), branch_input.detach(), alpha, beta, place, has_read)
            if last is not None and not has_read:
                alpha = torch.cat([last.reads.to(alpha.device), seen.mixes], dim=-1)
                seen = replace(seen, branch_input=last.branch_input, alpha=alpha)
            else:
                last = seen
            see(seen)

    handles = [connection.register_forward_hook(record, prepend=True) for connection in known]
    try:
        with torch.compiler.set_stance("force_eager"):
            yield
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def in_evaluation_mode(model: nn.Module) -> Iterator[None]:
    """Within it, a model is in evaluation mode; afterwards each of its modules is in the mode that it was in."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def with_parameters(connection: nn.Module) -> AbstractContextManager:
    """A context in which a connection has its parameters, also those that accelerate has offloaded."""
    if not hasattr(connection, "_hf_hook"):
        return nullcontext()
    from accelerate.utils import align_module_device  # who offloads a model has it

    return align_module_device(connection)


def _mask_of(model: nn.Module, part: nn.Module) -> str:
    """The input that says which positions of a part of the model are padding."""
    config: Any = getattr(outermost_model(model), "config", None)
    observed = {id(connection) for connection in connections_of(part).values()}
    paths = [name.split(".") for name, connection in connections_of(model).items() if id(connection) in observed]
    of_decoder = getattr(config, "is_encoder_decoder", False) and any("decoder" in path for path in paths)
    return "decoder_attention_mask" if of_decoder else "attention_mask"


def _kept(mask: torch.Tensor | None) -> torch.Tensor | None:
    """Which positions are no padding, `[B, S]`; None when all are."""
    if mask is None or mask.ndim != 2 or bool(mask.all()):
        return None
    return mask != 0


IGNORED = -100  # as a label


def first_example(trainer: Trainer, tokens: int) -> dict[str, torch.Tensor]:
    """The first `tokens` token ids `[1, S]` of the first training example, without padding.

    For an encoder-decoder also what its decoder reads: `decoder_input_ids`, or the labels that it is made from.

    Raises `HyperConnError` when the example holds no `input_ids`.
    """
    data: Any = trainer.train_dataset
    with kept_random_state():
        example: Any = next(iter(data if data is not None else ()), {})
    if "input_ids" not in example:
        raise HyperConnError(
            f"the first training example holds {', '.join(example) or 'nothing'}, and no input_ids to watch the "
            "connections on. Tokenise the dataset before it is given to the Trainer."
        )
    model: Any = trainer.model
    names = ["input_ids"]
    if getattr(getattr(outermost_model(model), "config", None), "is_encoder_decoder", False):
        names += [name for name in ("decoder_input_ids", "labels") if name in example][:1]
    return {name: _unpadded(example, name)[None, :tokens] for name in names}


@contextmanager
def kept_random_state() -> Iterator[None]:
    """Within it, what is drawn from the generators of Python, numpy and torch (CPU) is drawn again afterwards."""
    of_python, of_numpy = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=[]):
        try:
            yield
        finally:
            random.setstate(of_python)
            np.random.set_state(of_numpy)


def _unpadded(example: Mapping[str, Any], name: str) -> torch.Tensor:
    """What an example holds by this name, `[S]`, where its mask is not zero; of labels, those learned, if any are."""
    values = torch.as_tensor(example[name]).flatten()
    if name == "labels":
        learned = values[values != IGNORED]
        return learned if len(learned) else values
    mask = example.get({"input_ids": "attention_mask", "decoder_input_ids": "decoder_attention_mask"}.get(name, ""))
    mask = None if mask is None else torch.as_tensor(mask).flatten()
    return values if mask is None or mask.shape != values.shape else values[mask != 0]
