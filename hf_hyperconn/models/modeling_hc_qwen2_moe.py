# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Qwen2-MoE with hyper-connections."""

from transformers import GenerationMixin
from transformers.models.qwen2_moe.modeling_qwen2_moe import (
    Qwen2MoeDecoderLayer,
    Qwen2MoeForCausalLM,
    Qwen2MoeForQuestionAnswering,
    Qwen2MoeForSequenceClassification,
    Qwen2MoeForTokenClassification,
    Qwen2MoeModel,
    Qwen2MoePreTrainedModel,
)

from .configuration_hc_qwen2_moe import HCQwen2MoeConfig
from .hyper_connections_layer import HyperConnectionDecoderLayer
from .modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
    reduce_recorded_streams,
)


class HCQwen2MoeDecoderLayer(HyperConnectionDecoderLayer, Qwen2MoeDecoderLayer):
    """A Qwen2-MoE decoder layer on residual streams."""


class HCQwen2MoePreTrainedModel(HyperConnectionPreTrainedModel, Qwen2MoePreTrainedModel):
    """What the HC-Qwen2-MoE classes share."""

    config: HCQwen2MoeConfig
    decoder_layer_class = HCQwen2MoeDecoderLayer
    heads = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


class HCQwen2MoeModel(HyperConnectionModel, HCQwen2MoePreTrainedModel, Qwen2MoeModel):
    """`Qwen2MoeModel` with hyper-connections."""

    forward = reduce_recorded_streams(Qwen2MoeModel.forward)


class HCQwen2MoeForCausalLM(HyperConnectionHead, HCQwen2MoePreTrainedModel, Qwen2MoeForCausalLM, GenerationMixin):
    """`Qwen2MoeForCausalLM` with hyper-connections."""

    model_class = HCQwen2MoeModel


class HCQwen2MoeForSequenceClassification(
    HyperConnectionHead, HCQwen2MoePreTrainedModel, Qwen2MoeForSequenceClassification
):
    """`Qwen2MoeForSequenceClassification` with hyper-connections."""

    model_class = HCQwen2MoeModel


class HCQwen2MoeForTokenClassification(HyperConnectionHead, HCQwen2MoePreTrainedModel, Qwen2MoeForTokenClassification):
    """`Qwen2MoeForTokenClassification` with hyper-connections."""

    model_class = HCQwen2MoeModel


class HCQwen2MoeForQuestionAnswering(HyperConnectionHead, HCQwen2MoePreTrainedModel, Qwen2MoeForQuestionAnswering):
    """`Qwen2MoeForQuestionAnswering` with hyper-connections."""

    model_class = HCQwen2MoeModel


__all__ = [
    "HCQwen2MoeForCausalLM",
    "HCQwen2MoeForQuestionAnswering",
    "HCQwen2MoeForSequenceClassification",
    "HCQwen2MoeForTokenClassification",
    "HCQwen2MoeModel",
    "HCQwen2MoePreTrainedModel",
]
