"""A model in stages, for the schedules of `torch.distributed.pipelining`."""

import copy
from itertools import pairwise
from typing import Any

import torch
from torch import nn

from ..errors import HyperConnError
from ..models.modeling_hyper_connections import HyperConnectionModel
from ..models.pipeline_stages import StandIns, around_layers, unread_states


class Stage(nn.Module):
    """A stage of a pipeline: some layers of a model, and its embeddings or its head.

    model: the model with these parts alone; its parameters keep their names in the whole model.
    is_first: whether it accepts token ids `[B, S]` instead of streams `[B, S, N, D]`.
    is_last: whether it returns logits, or last hidden states without a head, instead of streams.
    """

    def __init__(self, model: Any, start: int, end: int):
        super().__init__()
        self.model = model
        base_model = model.base_model
        self.is_first, self.is_last = start == 0, end == len(base_model.decoder_layers)
        before, after = around_layers(model.config.base_model_type, base_model.stack)
        self._stand_ins = StandIns(base_model, start, end)
        for name in (*(() if self.is_first else before), *(() if self.is_last else after)):
            setattr(base_model, name, nn.Identity())
        if not self.is_last and model is not base_model:
            model.set_output_embeddings(nn.Identity())

    def forward(self, states: torch.Tensor, **kwargs) -> torch.Tensor:
        """Run the stage on token ids or streams.

        kwargs: other arguments of the model, such as `attention_mask`; the same for every stage.
        """
        model = self.model
        inputs = {"input_ids": states}
        if not self.is_first:
            self._stand_ins.receive(states)
            inputs = {"inputs_embeds": unread_states(states, model.config.hidden_size, model.dtype)}
        outputs = (model if self.is_last else model.base_model)(**inputs, use_cache=False, **kwargs)
        return outputs[0] if self.is_last else self._stand_ins.sent()


def pipeline_stages(model: Any, n: int) -> list[Stage]:
    """Split a model into stages, which pass streams `[B, S, N, D]` to each other.

    The first stage embeds and expands, the last one reads the streams out. Stages share the parameters of `model`, and
    `stage.model.state_dict()` has their names in it: together the stages have each parameter once.

    model: a causal language model or a base model with hyper-connections.
    n: number of stages; with a remainder the first stages get a layer more.

    Raises `HyperConnError` for another model, for tied embeddings, an auxiliary loss of routers, and more stages than
    layers. Raises `ValueError` for a family without `base_model_pp_plan`.
    """
    base_model = getattr(model, "base_model", None)
    if not isinstance(base_model, HyperConnectionModel):
        raise HyperConnError(
            f"model must be a causal language model with hyper-connections, or its base model "
            f"(got {type(model).__name__}). Give one."
        )
    if model is not base_model and model.get_output_embeddings() is None:
        raise HyperConnError(
            f"model must have no head, or a causal language model's (got {type(model).__name__}). "
            f"Split its base model, model.base_model."
        )
    if model.config.tie_word_embeddings:
        raise HyperConnError(
            "tie_word_embeddings must be False (got True): the first and the last stage would train one matrix apart. "
            "Give the head a copy of the matrix, and set it to False."
        )
    if getattr(model.config, "output_router_logits", False):
        raise HyperConnError(
            "output_router_logits must be False (got True): no stage has the routers of all layers, for their loss. "
            "Set it to False."
        )
    layers = len(base_model.decoder_layers)
    if not 1 <= n <= layers:
        raise HyperConnError(f"n must be between 1 and the number of layers, {layers} (got {n}). Give fewer stages.")
    around_layers(model.config.base_model_type, base_model.stack)
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    ends = [stage * (layers // n) + min(stage, layers % n) for stage in range(n + 1)]
    return [Stage(copy.deepcopy(model, dict(shared)), *bounds) for bounds in pairwise(ends)]
