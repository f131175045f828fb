# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""OLMo 3 with hyper-connections."""

import torch
from transformers import GenerationMixin
from transformers.models.olmo3.modeling_olmo3 import (
    Olmo3DecoderLayer,
    Olmo3ForCausalLM,
    Olmo3ForSequenceClassification,
    Olmo3Model,
    Olmo3PreTrainedModel,
)

from .configuration_hc_olmo3 import HCOlmo3Config
from .hyper_connections_layer import HyperConnectionDecoderLayer
from .modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
    reduce_recorded_streams,
)


class HCOlmo3DecoderLayer(HyperConnectionDecoderLayer, Olmo3DecoderLayer):
    """An OLMo 3 decoder layer on residual streams."""

    def attention_branch(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """Attention and norm, `[B, S, D]` to `[B, S, D]`."""
        return self.post_attention_layernorm(self.self_attn(hidden_states=hidden_states, **kwargs)[0])

    def mlp_branch(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """MLP and norm, `[B, S, D]` to `[B, S, D]`."""
        return self.post_feedforward_layernorm(self.mlp(hidden_states))


class HCOlmo3PreTrainedModel(HyperConnectionPreTrainedModel, Olmo3PreTrainedModel):
    """What the HC-OLMo 3 classes share."""

    config: HCOlmo3Config
    decoder_layer_class = HCOlmo3DecoderLayer
    heads = ("ForCausalLM", "ForSequenceClassification")


class HCOlmo3Model(HyperConnectionModel, HCOlmo3PreTrainedModel, Olmo3Model):
    """`Olmo3Model` with hyper-connections."""

    forward = reduce_recorded_streams(Olmo3Model.forward)


class HCOlmo3ForCausalLM(HyperConnectionHead, HCOlmo3PreTrainedModel, Olmo3ForCausalLM, GenerationMixin):
    """`Olmo3ForCausalLM` with hyper-connections."""

    model_class = HCOlmo3Model


class HCOlmo3ForSequenceClassification(HyperConnectionHead, HCOlmo3PreTrainedModel, Olmo3ForSequenceClassification):
    """`Olmo3ForSequenceClassification` with hyper-connections."""

    model_class = HCOlmo3Model


__all__ = [
    "HCOlmo3ForCausalLM",
    "HCOlmo3ForSequenceClassification",
    "HCOlmo3Model",
    "HCOlmo3PreTrainedModel",
]
