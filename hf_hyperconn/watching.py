"""A forward in which one stack of a model is observed, at the positions that are no padding."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .errors import HyperConnError
from .observation import Observation, connections_of, observe, with_layers
from .outermost import outermost_model

Inputs = torch.Tensor | Mapping[str, torch.Tensor]
"""What a model is run on: token ids `[B, S]`, or what it takes by name, such as `{"pixel_values": images}`."""


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
