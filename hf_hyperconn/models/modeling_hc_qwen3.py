# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Qwen3 with hyper-connections."""

from transformers import GenerationMixin
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3DecoderLayer,
    Qwen3ForCausalLM,
    Qwen3ForQuestionAnswering,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Qwen3Model,
    Qwen3PreTrainedModel,
)

from .configuration_hc_qwen3 import HCQwen3Config
from .hyper_connections_layer import HyperConnectionDecoderLayer
from .modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
    reduce_recorded_streams,
)


class HCQwen3DecoderLayer(HyperConnectionDecoderLayer, Qwen3DecoderLayer):
    """A Qwen3 decoder layer on residual streams."""


class HCQwen3PreTrainedModel(HyperConnectionPreTrainedModel, Qwen3PreTrainedModel):
    """What the HC-Qwen3 classes share."""

    config: HCQwen3Config
    decoder_layer_class = HCQwen3DecoderLayer
    heads = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


class HCQwen3Model(HyperConnectionModel, HCQwen3PreTrainedModel, Qwen3Model):
    """`Qwen3Model` with hyper-connections."""

    forward = reduce_recorded_streams(Qwen3Model.forward)


class HCQwen3ForCausalLM(HyperConnectionHead, HCQwen3PreTrainedModel, Qwen3ForCausalLM, GenerationMixin):
    """`Qwen3ForCausalLM` with hyper-connections."""

    model_class = HCQwen3Model


class HCQwen3ForSequenceClassification(HyperConnectionHead, HCQwen3PreTrainedModel, Qwen3ForSequenceClassification):
    """`Qwen3ForSequenceClassification` with hyper-connections."""

    model_class = HCQwen3Model


class HCQwen3ForTokenClassification(HyperConnectionHead, HCQwen3PreTrainedModel, Qwen3ForTokenClassification):
    """`Qwen3ForTokenClassification` with hyper-connections."""

    model_class = HCQwen3Model


class HCQwen3ForQuestionAnswering(HyperConnectionHead, HCQwen3PreTrainedModel, Qwen3ForQuestionAnswering):
    """`Qwen3ForQuestionAnswering` with hyper-connections."""

    model_class = HCQwen3Model


__all__ = [
    "HCQwen3ForCausalLM",
    "HCQwen3ForQuestionAnswering",
    "HCQwen3ForSequenceClassification",
    "HCQwen3ForTokenClassification",
    "HCQwen3Model",
    "HCQwen3PreTrainedModel",
]
