# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""StarCoder2 with hyper-connections."""

from transformers import GenerationMixin
from transformers.models.starcoder2.modeling_starcoder2 import (
    Starcoder2DecoderLayer,
    Starcoder2ForCausalLM,
    Starcoder2ForSequenceClassification,
    Starcoder2ForTokenClassification,
    Starcoder2Model,
    Starcoder2PreTrainedModel,
)

from .configuration_hc_starcoder2 import HCStarcoder2Config
from .hyper_connections_layer import HyperConnectionDecoderLayer
from .modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
    reduce_recorded_streams,
)


class HCStarcoder2DecoderLayer(HyperConnectionDecoderLayer, Starcoder2DecoderLayer):
    """A StarCoder2 decoder layer on residual streams."""

    output_projections = ("o_proj", "c_proj")


class HCStarcoder2PreTrainedModel(HyperConnectionPreTrainedModel, Starcoder2PreTrainedModel):
    """What the HC-StarCoder2 classes share."""

    config: HCStarcoder2Config
    decoder_layer_class = HCStarcoder2DecoderLayer
    heads = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification")


class HCStarcoder2Model(HyperConnectionModel, HCStarcoder2PreTrainedModel, Starcoder2Model):
    """`Starcoder2Model` with hyper-connections."""

    forward = reduce_recorded_streams(Starcoder2Model.forward)


class HCStarcoder2ForCausalLM(
    HyperConnectionHead, HCStarcoder2PreTrainedModel, Starcoder2ForCausalLM, GenerationMixin
):
    """`Starcoder2ForCausalLM` with hyper-connections."""

    model_class = HCStarcoder2Model


class HCStarcoder2ForSequenceClassification(
    HyperConnectionHead, HCStarcoder2PreTrainedModel, Starcoder2ForSequenceClassification
):
    """`Starcoder2ForSequenceClassification` with hyper-connections."""

    model_class = HCStarcoder2Model


class HCStarcoder2ForTokenClassification(
    HyperConnectionHead, HCStarcoder2PreTrainedModel, Starcoder2ForTokenClassification
):
    """`Starcoder2ForTokenClassification` with hyper-connections."""

    model_class = HCStarcoder2Model


__all__ = [
    "HCStarcoder2ForCausalLM",
    "HCStarcoder2ForSequenceClassification",
    "HCStarcoder2ForTokenClassification",
    "HCStarcoder2Model",
    "HCStarcoder2PreTrainedModel",
]
