# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Granite with hyper-connections."""

import torch
from transformers import GenerationMixin
from transformers.models.granite.modeling_granite import (
    GraniteDecoderLayer,
    GraniteForCausalLM,
    GraniteModel,
    GranitePreTrainedModel,
)

from .configuration_hc_granite import HCGraniteConfig
from .hyper_connections_layer import HyperConnectionDecoderLayer
from .modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
    reduce_recorded_streams,
)


class HCGraniteDecoderLayer(HyperConnectionDecoderLayer, GraniteDecoderLayer):
    """A Granite decoder layer on residual streams."""

    def attention_branch(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """Norm, attention and residual multiplier, `[B, S, D]` to `[B, S, D]`."""
        return super().attention_branch(hidden_states, **kwargs) * self.residual_multiplier

    def mlp_branch(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norm, MLP and residual multiplier, `[B, S, D]` to `[B, S, D]`."""
        return super().mlp_branch(hidden_states) * self.residual_multiplier


class HCGranitePreTrainedModel(HyperConnectionPreTrainedModel, GranitePreTrainedModel):
    """What the HC-Granite classes share."""

    config: HCGraniteConfig
    decoder_layer_class = HCGraniteDecoderLayer
    heads = ("ForCausalLM",)


class HCGraniteModel(HyperConnectionModel, HCGranitePreTrainedModel, GraniteModel):
    """`GraniteModel` with hyper-connections."""

    forward = reduce_recorded_streams(GraniteModel.forward)


class HCGraniteForCausalLM(HyperConnectionHead, HCGranitePreTrainedModel, GraniteForCausalLM, GenerationMixin):
    """`GraniteForCausalLM` with hyper-connections."""

    model_class = HCGraniteModel


__all__ = [
    "HCGraniteForCausalLM",
    "HCGraniteModel",
    "HCGranitePreTrainedModel",
]
