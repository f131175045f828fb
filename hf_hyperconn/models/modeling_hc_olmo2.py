# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""OLMo 2 with hyper-connections."""

import torch
from transformers import GenerationMixin
from transformers.models.olmo2.modeling_olmo2 import (
    Olmo2DecoderLayer,
    Olmo2ForCausalLM,
    Olmo2ForSequenceClassification,
    Olmo2Model,
    Olmo2PreTrainedModel,
)

from .configuration_hc_olmo2 import HCOlmo2Config
from .hyper_connections_layer import HyperConnectionDecoderLayer
from .modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
    reduce_recorded_streams,
)


class HCOlmo2DecoderLayer(HyperConnectionDecoderLayer, Olmo2DecoderLayer):
    """An OLMo 2 decoder layer on residual streams."""

    def attention_branch(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """Attention and norm, `[B, S, D]` to `[B, S, D]`."""
        return self.post_attention_layernorm(self.self_attn(hidden_states=hidden_states, **kwargs)[0])

    def mlp_branch(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """MLP and norm, `[B, S, D]` to `[B, S, D]`."""
        return self.post_feedforward_layernorm(self.mlp(hidden_states))


class HCOlmo2PreTrainedModel(HyperConnectionPreTrainedModel, Olmo2PreTrainedModel):
    """What the HC-OLMo 2 classes share."""

    config: HCOlmo2Config
    decoder_layer_class = HCOlmo2DecoderLayer
    heads = ("ForCausalLM", "ForSequenceClassification")


class HCOlmo2Model(HyperConnectionModel, HCOlmo2PreTrainedModel, Olmo2Model):
    """`Olmo2Model` with hyper-connections."""

    forward = reduce_recorded_streams(Olmo2Model.forward)


class HCOlmo2ForCausalLM(HyperConnectionHead, HCOlmo2PreTrainedModel, Olmo2ForCausalLM, GenerationMixin):
    """`Olmo2ForCausalLM` with hyper-connections."""

    model_class = HCOlmo2Model


class HCOlmo2ForSequenceClassification(HyperConnectionHead, HCOlmo2PreTrainedModel, Olmo2ForSequenceClassification):
    """`Olmo2ForSequenceClassification` with hyper-connections."""

    model_class = HCOlmo2Model


__all__ = [
    "HCOlmo2ForCausalLM",
    "HCOlmo2ForSequenceClassification",
    "HCOlmo2Model",
    "HCOlmo2PreTrainedModel",
]
