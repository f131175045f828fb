# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Qwen3-MoE with hyper-connections."""

from transformers import GenerationMixin
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeDecoderLayer,
    Qwen3MoeForCausalLM,
    Qwen3MoeForQuestionAnswering,
    Qwen3MoeForSequenceClassification,
    Qwen3MoeForTokenClassification,
    Qwen3MoeModel,
    Qwen3MoePreTrainedModel,
)

from .configuration_hc_qwen3_moe import HCQwen3MoeConfig
from .hyper_connections_layer import HyperConnectionDecoderLayer
from .modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
    reduce_recorded_streams,
)


class HCQwen3MoeDecoderLayer(HyperConnectionDecoderLayer, Qwen3MoeDecoderLayer):
    """A Qwen3-MoE decoder layer on residual streams."""


class HCQwen3MoePreTrainedModel(HyperConnectionPreTrainedModel, Qwen3MoePreTrainedModel):
    """What the HC-Qwen3-MoE classes share."""

    config: HCQwen3MoeConfig
    decoder_layer_class = HCQwen3MoeDecoderLayer
    heads = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


class HCQwen3MoeModel(HyperConnectionModel, HCQwen3MoePreTrainedModel, Qwen3MoeModel):
    """`Qwen3MoeModel` with hyper-connections."""

    forward = reduce_recorded_streams(Qwen3MoeModel.forward)


class HCQwen3MoeForCausalLM(HyperConnectionHead, HCQwen3MoePreTrainedModel, Qwen3MoeForCausalLM, GenerationMixin):
    """`Qwen3MoeForCausalLM` with hyper-connections."""

    model_class = HCQwen3MoeModel


class HCQwen3MoeForSequenceClassification(
    HyperConnectionHead, HCQwen3MoePreTrainedModel, Qwen3MoeForSequenceClassification
):
    """`Qwen3MoeForSequenceClassification` with hyper-connections."""

    model_class = HCQwen3MoeModel


class HCQwen3MoeForTokenClassification(HyperConnectionHead, HCQwen3MoePreTrainedModel, Qwen3MoeForTokenClassification):
    """`Qwen3MoeForTokenClassification` with hyper-connections."""

    model_class = HCQwen3MoeModel


class HCQwen3MoeForQuestionAnswering(HyperConnectionHead, HCQwen3MoePreTrainedModel, Qwen3MoeForQuestionAnswering):
    """`Qwen3MoeForQuestionAnswering` with hyper-connections."""

    model_class = HCQwen3MoeModel


__all__ = [
    "HCQwen3MoeForCausalLM",
    "HCQwen3MoeForQuestionAnswering",
    "HCQwen3MoeForSequenceClassification",
    "HCQwen3MoeForTokenClassification",
    "HCQwen3MoeModel",
    "HCQwen3MoePreTrainedModel",
]
