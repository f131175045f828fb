# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Mixtral with hyper-connections."""

from transformers import GenerationMixin
from transformers.models.mixtral.modeling_mixtral import (
    MixtralDecoderLayer,
    MixtralForCausalLM,
    MixtralForQuestionAnswering,
    MixtralForSequenceClassification,
    MixtralForTokenClassification,
    MixtralModel,
    MixtralPreTrainedModel,
)

from .configuration_hc_mixtral import HCMixtralConfig
from .hyper_connections_layer import HyperConnectionDecoderLayer
from .modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
    reduce_recorded_streams,
)


class HCMixtralDecoderLayer(HyperConnectionDecoderLayer, MixtralDecoderLayer):
    """A Mixtral decoder layer on residual streams."""


class HCMixtralPreTrainedModel(HyperConnectionPreTrainedModel, MixtralPreTrainedModel):
    """What the HC-Mixtral classes share."""

    config: HCMixtralConfig
    decoder_layer_class = HCMixtralDecoderLayer
    heads = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


class HCMixtralModel(HyperConnectionModel, HCMixtralPreTrainedModel, MixtralModel):
    """`MixtralModel` with hyper-connections."""

    forward = reduce_recorded_streams(MixtralModel.forward)


class HCMixtralForCausalLM(HyperConnectionHead, HCMixtralPreTrainedModel, MixtralForCausalLM, GenerationMixin):
    """`MixtralForCausalLM` with hyper-connections."""

    model_class = HCMixtralModel


class HCMixtralForSequenceClassification(
    HyperConnectionHead, HCMixtralPreTrainedModel, MixtralForSequenceClassification
):
    """`MixtralForSequenceClassification` with hyper-connections."""

    model_class = HCMixtralModel


class HCMixtralForTokenClassification(HyperConnectionHead, HCMixtralPreTrainedModel, MixtralForTokenClassification):
    """`MixtralForTokenClassification` with hyper-connections."""

    model_class = HCMixtralModel


class HCMixtralForQuestionAnswering(HyperConnectionHead, HCMixtralPreTrainedModel, MixtralForQuestionAnswering):
    """`MixtralForQuestionAnswering` with hyper-connections."""

    model_class = HCMixtralModel


__all__ = [
    "HCMixtralForCausalLM",
    "HCMixtralForQuestionAnswering",
    "HCMixtralForSequenceClassification",
    "HCMixtralForTokenClassification",
    "HCMixtralModel",
    "HCMixtralPreTrainedModel",
]
