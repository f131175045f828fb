# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Gemma with hyper-connections."""

from transformers import GenerationMixin
from transformers.models.gemma.modeling_gemma import (
    GemmaDecoderLayer,
    GemmaForCausalLM,
    GemmaForSequenceClassification,
    GemmaForTokenClassification,
    GemmaModel,
    GemmaPreTrainedModel,
)

from .configuration_hc_gemma import HCGemmaConfig
from .hyper_connections_layer import HyperConnectionDecoderLayer
from .modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
    reduce_recorded_streams,
)


class HCGemmaDecoderLayer(HyperConnectionDecoderLayer, GemmaDecoderLayer):
    """A Gemma decoder layer on residual streams."""


class HCGemmaPreTrainedModel(HyperConnectionPreTrainedModel, GemmaPreTrainedModel):
    """What the HC-Gemma classes share."""

    config: HCGemmaConfig
    decoder_layer_class = HCGemmaDecoderLayer
    heads = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification")


class HCGemmaModel(HyperConnectionModel, HCGemmaPreTrainedModel, GemmaModel):
    """`GemmaModel` with hyper-connections."""

    forward = reduce_recorded_streams(GemmaModel.forward)


class HCGemmaForCausalLM(HyperConnectionHead, HCGemmaPreTrainedModel, GemmaForCausalLM, GenerationMixin):
    """`GemmaForCausalLM` with hyper-connections."""

    model_class = HCGemmaModel


class HCGemmaForSequenceClassification(HyperConnectionHead, HCGemmaPreTrainedModel, GemmaForSequenceClassification):
    """`GemmaForSequenceClassification` with hyper-connections."""

    model_class = HCGemmaModel


class HCGemmaForTokenClassification(HyperConnectionHead, HCGemmaPreTrainedModel, GemmaForTokenClassification):
    """`GemmaForTokenClassification` with hyper-connections."""

    model_class = HCGemmaModel


__all__ = [
    "HCGemmaForCausalLM",
    "HCGemmaForSequenceClassification",
    "HCGemmaForTokenClassification",
    "HCGemmaModel",
    "HCGemmaPreTrainedModel",
]
