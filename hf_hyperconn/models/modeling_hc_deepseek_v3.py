# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""DeepSeek-V3 with hyper-connections."""

from transformers import GenerationMixin
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3ForCausalLM,
    DeepseekV3ForSequenceClassification,
    DeepseekV3ForTokenClassification,
    DeepseekV3Model,
    DeepseekV3PreTrainedModel,
)

from .configuration_hc_deepseek_v3 import HCDeepseekV3Config
from .hyper_connections_layer import HyperConnectionDecoderLayer
from .modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
    reduce_recorded_streams,
)


class HCDeepseekV3DecoderLayer(HyperConnectionDecoderLayer, DeepseekV3DecoderLayer):
    """A DeepSeek-V3 decoder layer on residual streams."""


class HCDeepseekV3PreTrainedModel(HyperConnectionPreTrainedModel, DeepseekV3PreTrainedModel):
    """What the HC-DeepSeek-V3 classes share."""

    config: HCDeepseekV3Config
    decoder_layer_class = HCDeepseekV3DecoderLayer
    heads = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification")


class HCDeepseekV3Model(HyperConnectionModel, HCDeepseekV3PreTrainedModel, DeepseekV3Model):
    """`DeepseekV3Model` with hyper-connections."""

    forward = reduce_recorded_streams(DeepseekV3Model.forward)


class HCDeepseekV3ForCausalLM(
    HyperConnectionHead, HCDeepseekV3PreTrainedModel, DeepseekV3ForCausalLM, GenerationMixin
):
    """`DeepseekV3ForCausalLM` with hyper-connections."""

    model_class = HCDeepseekV3Model


class HCDeepseekV3ForSequenceClassification(
    HyperConnectionHead, HCDeepseekV3PreTrainedModel, DeepseekV3ForSequenceClassification
):
    """`DeepseekV3ForSequenceClassification` with hyper-connections."""

    model_class = HCDeepseekV3Model


class HCDeepseekV3ForTokenClassification(
    HyperConnectionHead, HCDeepseekV3PreTrainedModel, DeepseekV3ForTokenClassification
):
    """`DeepseekV3ForTokenClassification` with hyper-connections."""

    model_class = HCDeepseekV3Model


__all__ = [
    "HCDeepseekV3ForCausalLM",
    "HCDeepseekV3ForSequenceClassification",
    "HCDeepseekV3ForTokenClassification",
    "HCDeepseekV3Model",
    "HCDeepseekV3PreTrainedModel",
]
