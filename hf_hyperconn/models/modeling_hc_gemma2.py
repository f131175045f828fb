# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Gemma 2 with hyper-connections."""

import torch
from transformers import GenerationMixin
from transformers.models.gemma2.modeling_gemma2 import (
    Gemma2DecoderLayer,
    Gemma2ForCausalLM,
    Gemma2ForSequenceClassification,
    Gemma2ForTokenClassification,
    Gemma2Model,
    Gemma2PreTrainedModel,
)

from .configuration_hc_gemma2 import HCGemma2Config
from .hyper_connections_layer import HyperConnectionDecoderLayer
from .modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
    reduce_recorded_streams,
)


class HCGemma2DecoderLayer(HyperConnectionDecoderLayer, Gemma2DecoderLayer):
    """A Gemma 2 decoder layer on residual streams."""

    def attention_branch(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """Norm, attention and norm, `[B, S, D]` to `[B, S, D]`."""
        return self.post_attention_layernorm(super().attention_branch(hidden_states, **kwargs))

    def mlp_branch(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norm, MLP and norm, `[B, S, D]` to `[B, S, D]`."""
        return self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(hidden_states)))


class HCGemma2PreTrainedModel(HyperConnectionPreTrainedModel, Gemma2PreTrainedModel):
    """What the HC-Gemma 2 classes share."""

    config: HCGemma2Config
    decoder_layer_class = HCGemma2DecoderLayer
    heads = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification")


class HCGemma2Model(HyperConnectionModel, HCGemma2PreTrainedModel, Gemma2Model):
    """`Gemma2Model` with hyper-connections."""

    forward = reduce_recorded_streams(Gemma2Model.forward)


class HCGemma2ForCausalLM(HyperConnectionHead, HCGemma2PreTrainedModel, Gemma2ForCausalLM, GenerationMixin):
    """`Gemma2ForCausalLM` with hyper-connections."""

    model_class = HCGemma2Model


class HCGemma2ForSequenceClassification(HyperConnectionHead, HCGemma2PreTrainedModel, Gemma2ForSequenceClassification):
    """`Gemma2ForSequenceClassification` with hyper-connections."""

    model_class = HCGemma2Model


class HCGemma2ForTokenClassification(HyperConnectionHead, HCGemma2PreTrainedModel, Gemma2ForTokenClassification):
    """`Gemma2ForTokenClassification` with hyper-connections."""

    model_class = HCGemma2Model


__all__ = [
    "HCGemma2ForCausalLM",
    "HCGemma2ForSequenceClassification",
    "HCGemma2ForTokenClassification",
    "HCGemma2Model",
    "HCGemma2PreTrainedModel",
]
