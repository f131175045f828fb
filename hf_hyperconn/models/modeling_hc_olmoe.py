# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Olmoe with hyper-connections."""

from transformers import GenerationMixin

from .configuration_hc_olmoe import HCOlmoeConfig
from .decoder_layer import HyperConnectionDecoderLayer, reduce_recorded_streams
from .modeling_hyper_connections import HyperConnectionHead, HyperConnectionModel, HyperConnectionPreTrainedModel
from .transformers_seam import names_are_gone

try:
    from transformers.models.olmoe.modeling_olmoe import (
        OlmoeDecoderLayer,
        OlmoeForCausalLM,
        OlmoeModel,
        OlmoePreTrainedModel,
    )
except ImportError as error:
    raise names_are_gone(error) from error


class HCOlmoeDecoderLayer(HyperConnectionDecoderLayer, OlmoeDecoderLayer):
    """`OlmoeDecoderLayer` on residual streams."""


class HCOlmoePreTrainedModel(HyperConnectionPreTrainedModel, OlmoePreTrainedModel):
    """What the HC-Olmoe classes share."""

    config: HCOlmoeConfig
    layer_classes = (HCOlmoeDecoderLayer,)
    auto_map = {
        "AutoConfig": "configuration_hc_olmoe.HCOlmoeConfig",
        "AutoModel": "modeling_hc_olmoe.HCOlmoeModel",
        "AutoModelForCausalLM": "modeling_hc_olmoe.HCOlmoeForCausalLM",
    }


class HCOlmoeModel(HyperConnectionModel, HCOlmoePreTrainedModel, OlmoeModel):
    """`OlmoeModel` with hyper-connections."""

    forward = reduce_recorded_streams(OlmoeModel.forward)


class HCOlmoeForCausalLM(HyperConnectionHead, HCOlmoePreTrainedModel, OlmoeForCausalLM, GenerationMixin):
    """`OlmoeForCausalLM` with hyper-connections."""

    model_class = HCOlmoeModel


__all__ = [
    "HCOlmoeForCausalLM",
    "HCOlmoeModel",
    "HCOlmoePreTrainedModel",
]
