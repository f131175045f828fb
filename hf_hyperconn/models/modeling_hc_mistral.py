# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Mistral with hyper-connections."""

from transformers import GenerationMixin
from transformers.models.mistral.modeling_mistral import (
    MistralDecoderLayer,
    MistralForCausalLM,
    MistralForQuestionAnswering,
    MistralForSequenceClassification,
    MistralForTokenClassification,
    MistralModel,
    MistralPreTrainedModel,
)

from .configuration_hc_mistral import HCMistralConfig
from .hyper_connections_layer import HyperConnectionDecoderLayer
from .modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
    reduce_recorded_streams,
)


class HCMistralDecoderLayer(HyperConnectionDecoderLayer, MistralDecoderLayer):
    """A Mistral decoder layer on residual streams."""


class HCMistralPreTrainedModel(HyperConnectionPreTrainedModel, MistralPreTrainedModel):
    """What the HC-Mistral classes share."""

    config: HCMistralConfig
    decoder_layer_class = HCMistralDecoderLayer
    heads = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


class HCMistralModel(HyperConnectionModel, HCMistralPreTrainedModel, MistralModel):
    """`MistralModel` with hyper-connections."""

    forward = reduce_recorded_streams(MistralModel.forward)


class HCMistralForCausalLM(HyperConnectionHead, HCMistralPreTrainedModel, MistralForCausalLM, GenerationMixin):
    """`MistralForCausalLM` with hyper-connections."""

    model_class = HCMistralModel


class HCMistralForSequenceClassification(
    HyperConnectionHead, HCMistralPreTrainedModel, MistralForSequenceClassification
):
    """`MistralForSequenceClassification` with hyper-connections."""

    model_class = HCMistralModel


class HCMistralForTokenClassification(HyperConnectionHead, HCMistralPreTrainedModel, MistralForTokenClassification):
    """`MistralForTokenClassification` with hyper-connections."""

    model_class = HCMistralModel


class HCMistralForQuestionAnswering(HyperConnectionHead, HCMistralPreTrainedModel, MistralForQuestionAnswering):
    """`MistralForQuestionAnswering` with hyper-connections."""

    model_class = HCMistralModel


__all__ = [
    "HCMistralForCausalLM",
    "HCMistralForQuestionAnswering",
    "HCMistralForSequenceClassification",
    "HCMistralForTokenClassification",
    "HCMistralModel",
    "HCMistralPreTrainedModel",
]
