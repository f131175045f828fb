# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Qwen2 with hyper-connections."""

from transformers import GenerationMixin
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2DecoderLayer,
    Qwen2ForCausalLM,
    Qwen2ForQuestionAnswering,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
    Qwen2Model,
    Qwen2PreTrainedModel,
)

from .configuration_hc_qwen2 import HCQwen2Config
from .hyper_connections_layer import HyperConnectionDecoderLayer
from .modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
    reduce_recorded_streams,
)


class HCQwen2DecoderLayer(HyperConnectionDecoderLayer, Qwen2DecoderLayer):
    """A Qwen2 decoder layer on residual streams."""


class HCQwen2PreTrainedModel(HyperConnectionPreTrainedModel, Qwen2PreTrainedModel):
    """What the HC-Qwen2 classes share."""

    config: HCQwen2Config
    decoder_layer_class = HCQwen2DecoderLayer
    heads = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


class HCQwen2Model(HyperConnectionModel, HCQwen2PreTrainedModel, Qwen2Model):
    """`Qwen2Model` with hyper-connections."""

    forward = reduce_recorded_streams(Qwen2Model.forward)


class HCQwen2ForCausalLM(HyperConnectionHead, HCQwen2PreTrainedModel, Qwen2ForCausalLM, GenerationMixin):
    """`Qwen2ForCausalLM` with hyper-connections."""

    model_class = HCQwen2Model


class HCQwen2ForSequenceClassification(HyperConnectionHead, HCQwen2PreTrainedModel, Qwen2ForSequenceClassification):
    """`Qwen2ForSequenceClassification` with hyper-connections."""

    model_class = HCQwen2Model


class HCQwen2ForTokenClassification(HyperConnectionHead, HCQwen2PreTrainedModel, Qwen2ForTokenClassification):
    """`Qwen2ForTokenClassification` with hyper-connections."""

    model_class = HCQwen2Model


class HCQwen2ForQuestionAnswering(HyperConnectionHead, HCQwen2PreTrainedModel, Qwen2ForQuestionAnswering):
    """`Qwen2ForQuestionAnswering` with hyper-connections."""

    model_class = HCQwen2Model


__all__ = [
    "HCQwen2ForCausalLM",
    "HCQwen2ForQuestionAnswering",
    "HCQwen2ForSequenceClassification",
    "HCQwen2ForTokenClassification",
    "HCQwen2Model",
    "HCQwen2PreTrainedModel",
]
