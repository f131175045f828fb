# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""GPT-OSS with hyper-connections."""

import torch
from transformers import GenerationMixin
from transformers.models.gpt_oss.modeling_gpt_oss import (
    GptOssDecoderLayer,
    GptOssForCausalLM,
    GptOssForSequenceClassification,
    GptOssForTokenClassification,
    GptOssModel,
    GptOssPreTrainedModel,
)

from .configuration_hc_gpt_oss import HCGptOssConfig
from .hyper_connections_layer import HyperConnectionDecoderLayer
from .modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
    reduce_recorded_streams,
)


class HCGptOssDecoderLayer(HyperConnectionDecoderLayer, GptOssDecoderLayer):
    """A GPT-OSS decoder layer on residual streams."""

    def mlp_branch(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norm and mixture of experts, without its router's scores, `[B, S, D]` to `[B, S, D]`."""
        return super().mlp_branch(hidden_states)[0]


class HCGptOssPreTrainedModel(HyperConnectionPreTrainedModel, GptOssPreTrainedModel):
    """What the HC-GPT-OSS classes share."""

    config: HCGptOssConfig
    decoder_layer_class = HCGptOssDecoderLayer
    heads = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification")


class HCGptOssModel(HyperConnectionModel, HCGptOssPreTrainedModel, GptOssModel):
    """`GptOssModel` with hyper-connections."""

    forward = reduce_recorded_streams(GptOssModel.forward)


class HCGptOssForCausalLM(HyperConnectionHead, HCGptOssPreTrainedModel, GptOssForCausalLM, GenerationMixin):
    """`GptOssForCausalLM` with hyper-connections."""

    model_class = HCGptOssModel


class HCGptOssForSequenceClassification(HyperConnectionHead, HCGptOssPreTrainedModel, GptOssForSequenceClassification):
    """`GptOssForSequenceClassification` with hyper-connections."""

    model_class = HCGptOssModel


class HCGptOssForTokenClassification(HyperConnectionHead, HCGptOssPreTrainedModel, GptOssForTokenClassification):
    """`GptOssForTokenClassification` with hyper-connections."""

    model_class = HCGptOssModel


__all__ = [
    "HCGptOssForCausalLM",
    "HCGptOssForSequenceClassification",
    "HCGptOssForTokenClassification",
    "HCGptOssModel",
    "HCGptOssPreTrainedModel",
]
