# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Phi-3 with hyper-connections."""

import torch
from transformers import GenerationMixin
from transformers.models.phi3.modeling_phi3 import (
    Phi3DecoderLayer,
    Phi3ForCausalLM,
    Phi3ForSequenceClassification,
    Phi3ForTokenClassification,
    Phi3Model,
    Phi3PreTrainedModel,
)

from .configuration_hc_phi3 import HCPhi3Config
from .hyper_connections_layer import HyperConnectionDecoderLayer
from .modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
    reduce_recorded_streams,
)


class HCPhi3DecoderLayer(HyperConnectionDecoderLayer, Phi3DecoderLayer):
    """A Phi-3 decoder layer on residual streams."""

    def attention_branch(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """Norm, attention and residual dropout, `[B, S, D]` to `[B, S, D]`."""
        return self.resid_attn_dropout(super().attention_branch(hidden_states, **kwargs))

    def mlp_branch(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norm, MLP and residual dropout, `[B, S, D]` to `[B, S, D]`."""
        return self.resid_mlp_dropout(super().mlp_branch(hidden_states))


class HCPhi3PreTrainedModel(HyperConnectionPreTrainedModel, Phi3PreTrainedModel):
    """What the HC-Phi-3 classes share."""

    config: HCPhi3Config
    decoder_layer_class = HCPhi3DecoderLayer
    heads = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification")


class HCPhi3Model(HyperConnectionModel, HCPhi3PreTrainedModel, Phi3Model):
    """`Phi3Model` with hyper-connections."""

    forward = reduce_recorded_streams(Phi3Model.forward)


class HCPhi3ForCausalLM(HyperConnectionHead, HCPhi3PreTrainedModel, Phi3ForCausalLM, GenerationMixin):
    """`Phi3ForCausalLM` with hyper-connections."""

    model_class = HCPhi3Model


class HCPhi3ForSequenceClassification(HyperConnectionHead, HCPhi3PreTrainedModel, Phi3ForSequenceClassification):
    """`Phi3ForSequenceClassification` with hyper-connections."""

    model_class = HCPhi3Model


class HCPhi3ForTokenClassification(HyperConnectionHead, HCPhi3PreTrainedModel, Phi3ForTokenClassification):
    """`Phi3ForTokenClassification` with hyper-connections."""

    model_class = HCPhi3Model


__all__ = [
    "HCPhi3ForCausalLM",
    "HCPhi3ForSequenceClassification",
    "HCPhi3ForTokenClassification",
    "HCPhi3Model",
    "HCPhi3PreTrainedModel",
]
