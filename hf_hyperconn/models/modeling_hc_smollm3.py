# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""SmolLM3 with hyper-connections."""

from transformers import GenerationMixin
from transformers.models.smollm3.modeling_smollm3 import (
    SmolLM3DecoderLayer,
    SmolLM3ForCausalLM,
    SmolLM3ForQuestionAnswering,
    SmolLM3ForSequenceClassification,
    SmolLM3ForTokenClassification,
    SmolLM3Model,
    SmolLM3PreTrainedModel,
)

from .configuration_hc_smollm3 import HCSmolLM3Config
from .hyper_connections_layer import HyperConnectionDecoderLayer
from .modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
    reduce_recorded_streams,
)


class HCSmolLM3DecoderLayer(HyperConnectionDecoderLayer, SmolLM3DecoderLayer):
    """A SmolLM3 decoder layer on residual streams."""


class HCSmolLM3PreTrainedModel(HyperConnectionPreTrainedModel, SmolLM3PreTrainedModel):
    """What the HC-SmolLM3 classes share."""

    config: HCSmolLM3Config
    decoder_layer_class = HCSmolLM3DecoderLayer
    heads = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


class HCSmolLM3Model(HyperConnectionModel, HCSmolLM3PreTrainedModel, SmolLM3Model):
    """`SmolLM3Model` with hyper-connections."""

    forward = reduce_recorded_streams(SmolLM3Model.forward)


class HCSmolLM3ForCausalLM(HyperConnectionHead, HCSmolLM3PreTrainedModel, SmolLM3ForCausalLM, GenerationMixin):
    """`SmolLM3ForCausalLM` with hyper-connections."""

    model_class = HCSmolLM3Model


class HCSmolLM3ForSequenceClassification(
    HyperConnectionHead, HCSmolLM3PreTrainedModel, SmolLM3ForSequenceClassification
):
    """`SmolLM3ForSequenceClassification` with hyper-connections."""

    model_class = HCSmolLM3Model


class HCSmolLM3ForTokenClassification(HyperConnectionHead, HCSmolLM3PreTrainedModel, SmolLM3ForTokenClassification):
    """`SmolLM3ForTokenClassification` with hyper-connections."""

    model_class = HCSmolLM3Model


class HCSmolLM3ForQuestionAnswering(HyperConnectionHead, HCSmolLM3PreTrainedModel, SmolLM3ForQuestionAnswering):
    """`SmolLM3ForQuestionAnswering` with hyper-connections."""

    model_class = HCSmolLM3Model


__all__ = [
    "HCSmolLM3ForCausalLM",
    "HCSmolLM3ForQuestionAnswering",
    "HCSmolLM3ForSequenceClassification",
    "HCSmolLM3ForTokenClassification",
    "HCSmolLM3Model",
    "HCSmolLM3PreTrainedModel",
]
