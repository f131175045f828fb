# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Seed-OSS with hyper-connections."""

from transformers import GenerationMixin
from transformers.models.seed_oss.modeling_seed_oss import (
    SeedOssDecoderLayer,
    SeedOssForCausalLM,
    SeedOssForQuestionAnswering,
    SeedOssForSequenceClassification,
    SeedOssForTokenClassification,
    SeedOssModel,
    SeedOssPreTrainedModel,
)

from .configuration_hc_seed_oss import HCSeedOssConfig
from .hyper_connections_layer import HyperConnectionDecoderLayer
from .modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
    reduce_recorded_streams,
)


class HCSeedOssDecoderLayer(HyperConnectionDecoderLayer, SeedOssDecoderLayer):
    """A Seed-OSS decoder layer on residual streams."""


class HCSeedOssPreTrainedModel(HyperConnectionPreTrainedModel, SeedOssPreTrainedModel):
    """What the HC-Seed-OSS classes share."""

    config: HCSeedOssConfig
    decoder_layer_class = HCSeedOssDecoderLayer
    heads = ("ForCausalLM", "ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


class HCSeedOssModel(HyperConnectionModel, HCSeedOssPreTrainedModel, SeedOssModel):
    """`SeedOssModel` with hyper-connections."""

    forward = reduce_recorded_streams(SeedOssModel.forward)


class HCSeedOssForCausalLM(HyperConnectionHead, HCSeedOssPreTrainedModel, SeedOssForCausalLM, GenerationMixin):
    """`SeedOssForCausalLM` with hyper-connections."""

    model_class = HCSeedOssModel


class HCSeedOssForSequenceClassification(
    HyperConnectionHead, HCSeedOssPreTrainedModel, SeedOssForSequenceClassification
):
    """`SeedOssForSequenceClassification` with hyper-connections."""

    model_class = HCSeedOssModel


class HCSeedOssForTokenClassification(HyperConnectionHead, HCSeedOssPreTrainedModel, SeedOssForTokenClassification):
    """`SeedOssForTokenClassification` with hyper-connections."""

    model_class = HCSeedOssModel


class HCSeedOssForQuestionAnswering(HyperConnectionHead, HCSeedOssPreTrainedModel, SeedOssForQuestionAnswering):
    """`SeedOssForQuestionAnswering` with hyper-connections."""

    model_class = HCSeedOssModel


__all__ = [
    "HCSeedOssForCausalLM",
    "HCSeedOssForQuestionAnswering",
    "HCSeedOssForSequenceClassification",
    "HCSeedOssForTokenClassification",
    "HCSeedOssModel",
    "HCSeedOssPreTrainedModel",
]
