# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Stages of a pipeline: each runs a part of the layers, and hands on the streams instead of hidden states.

A stage is a whole model with stand-ins for the layers of other stages. The stand-in before its own layers returns the
received streams; the stand-in after them keeps the streams to send. So the model's `forward` meets hidden states
alone, and layers keep their places in the model.
"""

from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import CONFIG_MAPPING, DynamicCache, PreTrainedModel

PLANS = {"olmoe": ("embed_tokens", "layers", "norm")}  # of families for which Transformers has none, by model type
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


class EarlierLayer(nn.Module):
    """Stands for a layer of an earlier stage, and returns the stage's received streams.

    place: place of the layer in the model.
    streams: `[B, S, N, D]`; kinds may hand on other N and D.
    """

    streams: torch.Tensor

    def __init__(self, place: int):
        super().__init__()
        self.place = place

    def forward(self, hidden_states: torch.Tensor, *args, cache=None, **kwargs) -> torch.Tensor:
        """Return the streams, and count their tokens in the cache, whose lengths make masks and positions."""
        if cache is not None:
            counted = self.streams.new_empty(self.streams.shape[0], 1, self.streams.shape[1], 1)
            cache.update(counted, counted, self.place)
        return self.streams


class LaterLayer(nn.Module):
    """Stands for a layer of a later stage, and keeps the streams that the stage sends."""

    streams: torch.Tensor

    def forward(self, states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Return hidden states `[B, S, D]`, which nothing reads."""
        if states.dim() != 4:
            return states
        self.streams = states
        return states[..., 0, :]

    def read_out(self, streams: torch.Tensor) -> torch.Tensor:
        raise ValueError(
            "output_hidden_states must be False (got True): a stage of a pipeline has no readout. Run the whole model."
        )


def around_layers(base_model_type: str, stack: str) -> tuple[list[str], list[str]]:
    """Return the names of a base model's modules before and after its layers, by Transformers' plan of stages.

    Raises `ValueError` without a plan, which tells that layers accept nothing but hidden states and masks.
    """
    known: Any = getattr(CONFIG_MAPPING[base_model_type], "base_model_pp_plan", None)
    plan: list[str] = list(known or PLANS.get(base_model_type, ()))
    if stack not in plan:
        raise ValueError(
            f"a model in stages must be of a family with base_model_pp_plan (got {base_model_type}, for which "
            f"Transformers has none). Use FSDP or tensor parallelism instead."
        )
    return plan[: plan.index(stack)], plan[plan.index(stack) + 1 :]


def refuse_generating_in_stages(model_class: Any, pp_size: int) -> None:
    """Raise `ValueError` for a class of models that Transformers would split wrongly, by fixed names."""
    plan = around_layers(model_class.config_class.base_model_type, "layers")
    heads = {head for base in model_class.__mro__ for head in vars(base).get("_pp_plan") or ()}
    splits = hasattr(PreTrainedModel, "maybe_distribute_model")
    if plan != (["embed_tokens"], ["norm"]) or heads != {"lm_head"} or not splits:
        raise ValueError(
            f"pp_size must be 1 for {model_class.__name__} (got {pp_size}): Transformers splits models with "
            f"modules embed_tokens, norm and lm_head. Use fsdp_size or tp_size."
        )


class StandIns:
    """The stand-ins of a stage that runs a base model's layers from `start` to before `end`."""

    def __init__(self, base_model: Any, start: int, end: int):
        layers = base_model.decoder_layers
        self.earlier = [EarlierLayer(place) for place in range(start)]
        self.later = [LaterLayer() for _ in range(end, len(layers))]
        for place, layer in (*enumerate(self.earlier), *enumerate(self.later, end)):
            layers[place] = layer

    def receive(self, streams: torch.Tensor) -> None:
        """Hand streams to the layers of the stage."""
        for layer in self.earlier:
            layer.streams = streams

    def sent(self) -> torch.Tensor:
        """Return the streams that the layers of the stage have returned."""
        return self.later[0].streams


def unread_states(like: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """Return hidden states `[B, S, D]` of NaN, which reach the output if anything but a stand-in reads them."""
    return torch.full((*like.shape[:2], size), torch.nan, dtype=dtype, device=like.device)


def exchange_streams(model: Any) -> None:
    """Let the stages of a model by Transformers exchange streams, each after its dtype and shape.

    Raises `ValueError` for recurrent layers, whose states tell all stages whether a text continues.
    """
    if any(hasattr(layer, "has_previous_state") for layer in DynamicCache(config=model.config).layers):
        raise ValueError("pp_size must be 1 for a model with recurrent layers. Use fsdp_size or tp_size.")
    stage = model._pp_stage
    layers = len(model.base_model.decoder_layers)
    stand_ins = StandIns(model.base_model, *stage.layer_range_for_rank(stage.pp_rank, layers))
    exchange = stage.communicate

    @wraps(exchange)
    def communicate(operation: str, *, device: torch.device, dtype: torch.dtype, tensor=None, shape=None):
        if operation == "send_forward":
            streams = stand_ins.sent()
            header = torch.tensor([DTYPES.index(streams.dtype), *streams.shape], device=device)
            exchange(operation, device=device, dtype=header.dtype, tensor=header)
            return exchange(operation, device=device, dtype=streams.dtype, tensor=streams)
        of_dtype, *sizes = exchange(operation, device=device, dtype=torch.int64, shape=(5,)).tolist()
        streams = exchange(operation, device=device, dtype=DTYPES[of_dtype], shape=tuple(sizes))
        stand_ins.receive(streams)
        return unread_states(streams, model.config.hidden_size, dtype)

    stage.communicate = communicate
