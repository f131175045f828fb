# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Llama with hyper-connections."""

from transformers import GenerationMixin

from .configuration_hc_llama import HCLlamaConfig
from .decoder_layer import HyperConnectionDecoderLayer, reduce_recorded_streams
from .modeling_hyper_connections import HyperConnectionHead, HyperConnectionModel, HyperConnectionPreTrainedModel
from .transformers_seam import missing_names_error

try:
    from transformers.models.llama.modeling_llama import (
        LlamaDecoderLayer,
        LlamaForCausalLM,
        LlamaForQuestionAnswering,
        LlamaForSequenceClassification,
        LlamaForTokenClassification,
        LlamaModel,
        LlamaPreTrainedModel,
    )
except ImportError as error:
    raise missing_names_error(error) from error


class HCLlamaDecoderLayer(HyperConnectionDecoderLayer, LlamaDecoderLayer):
    """`LlamaDecoderLayer` on residual streams."""


class HCLlamaPreTrainedModel(HyperConnectionPreTrainedModel, LlamaPreTrainedModel):
    """Base of the HC-Llama classes."""

    config: HCLlamaConfig
    layer_classes = (HCLlamaDecoderLayer,)
    auto_map = {
        "AutoConfig": "configuration_hc_llama.HCLlamaConfig",
        "AutoModel": "modeling_hc_llama.HCLlamaModel",
        "AutoModelForCausalLM": "modeling_hc_llama.HCLlamaForCausalLM",
        "AutoModelForSequenceClassification": "modeling_hc_llama.HCLlamaForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hc_llama.HCLlamaForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_hc_llama.HCLlamaForQuestionAnswering",
    }


class HCLlamaModel(HyperConnectionModel, HCLlamaPreTrainedModel, LlamaModel):
    """`LlamaModel` with hyper-connections."""

    forward = reduce_recorded_streams(LlamaModel.forward)


class HCLlamaForCausalLM(HyperConnectionHead, HCLlamaPreTrainedModel, LlamaForCausalLM, GenerationMixin):
    """`LlamaForCausalLM` with hyper-connections."""

    model_class = HCLlamaModel


class HCLlamaForSequenceClassification(HyperConnectionHead, HCLlamaPreTrainedModel, LlamaForSequenceClassification):
    """`LlamaForSequenceClassification` with hyper-connections."""

    model_class = HCLlamaModel


class HCLlamaForTokenClassification(HyperConnectionHead, HCLlamaPreTrainedModel, LlamaForTokenClassification):
    """`LlamaForTokenClassification` with hyper-connections."""

    model_class = HCLlamaModel


class HCLlamaForQuestionAnswering(HyperConnectionHead, HCLlamaPreTrainedModel, LlamaForQuestionAnswering):
    """`LlamaForQuestionAnswering` with hyper-connections."""

    model_class = HCLlamaModel


__all__ = [
    "HCLlamaForCausalLM",
    "HCLlamaForQuestionAnswering",
    "HCLlamaForSequenceClassification",
    "HCLlamaForTokenClassification",
    "HCLlamaModel",
    "HCLlamaPreTrainedModel",
]
