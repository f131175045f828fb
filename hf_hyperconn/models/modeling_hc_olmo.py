# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""OLMo with hyper-connections."""

from transformers import GenerationMixin
from transformers.models.olmo.modeling_olmo import (
    OlmoDecoderLayer,
    OlmoForCausalLM,
    OlmoForSequenceClassification,
    OlmoModel,
    OlmoPreTrainedModel,
)

from .configuration_hc_olmo import HCOlmoConfig
from .hyper_connections_layer import HyperConnectionDecoderLayer
from .modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
    reduce_recorded_streams,
)


class HCOlmoDecoderLayer(HyperConnectionDecoderLayer, OlmoDecoderLayer):
    """An OLMo decoder layer on residual streams."""


class HCOlmoPreTrainedModel(HyperConnectionPreTrainedModel, OlmoPreTrainedModel):
    """What the HC-OLMo classes share."""

    config: HCOlmoConfig
    decoder_layer_class = HCOlmoDecoderLayer
    heads = ("ForCausalLM", "ForSequenceClassification")


class HCOlmoModel(HyperConnectionModel, HCOlmoPreTrainedModel, OlmoModel):
    """`OlmoModel` with hyper-connections."""

    forward = reduce_recorded_streams(OlmoModel.forward)


class HCOlmoForCausalLM(HyperConnectionHead, HCOlmoPreTrainedModel, OlmoForCausalLM, GenerationMixin):
    """`OlmoForCausalLM` with hyper-connections."""

    model_class = HCOlmoModel


class HCOlmoForSequenceClassification(HyperConnectionHead, HCOlmoPreTrainedModel, OlmoForSequenceClassification):
    """`OlmoForSequenceClassification` with hyper-connections."""

    model_class = HCOlmoModel


__all__ = [
    "HCOlmoForCausalLM",
    "HCOlmoForSequenceClassification",
    "HCOlmoModel",
    "HCOlmoPreTrainedModel",
]
