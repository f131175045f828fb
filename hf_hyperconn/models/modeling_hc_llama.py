# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Llama with hyper-connections."""

from torch import nn
from transformers import AutoModel, GenerationMixin
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaModel,
    LlamaPreTrainedModel,
)

from .configuration_hc_llama import HCLlamaConfig
from .modeling_hyper_connections import (
    HyperConnectionDecoderLayer,
    HyperConnectionPreTrainedModel,
    no_decoder_layers,
    reduce_recorded_streams,
)


class HCLlamaDecoderLayer(HyperConnectionDecoderLayer, LlamaDecoderLayer):
    """A Llama decoder layer on residual streams."""


class HCLlamaPreTrainedModel(HyperConnectionPreTrainedModel, LlamaPreTrainedModel):
    """What the HC-Llama classes share."""

    config: HCLlamaConfig
    _no_split_modules = ["HCLlamaDecoderLayer"]
    _can_record_outputs = {"hidden_states": HCLlamaDecoderLayer, "attentions": LlamaAttention}
    auto_map = {
        "AutoConfig": "configuration_hc_llama.HCLlamaConfig",
        "AutoModel": "modeling_hc_llama.HCLlamaModel",
        "AutoModelForCausalLM": "modeling_hc_llama.HCLlamaForCausalLM",
        "AutoModelForSequenceClassification": "modeling_hc_llama.HCLlamaForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_hc_llama.HCLlamaForTokenClassification",
        "AutoModelForQuestionAnswering": "modeling_hc_llama.HCLlamaForQuestionAnswering",
    }


class HCLlamaModel(HCLlamaPreTrainedModel, LlamaModel):
    """`LlamaModel` with hyper-connections."""

    forward = reduce_recorded_streams(LlamaModel.forward)

    def __init__(self, config: HCLlamaConfig):
        with no_decoder_layers(config):
            super().__init__(config)
        self.layers = nn.ModuleList(HCLlamaDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.post_init()


class HCLlamaForCausalLM(HCLlamaPreTrainedModel, LlamaForCausalLM, GenerationMixin):
    """`LlamaForCausalLM` with hyper-connections."""

    def __init__(self, config: HCLlamaConfig):
        with no_decoder_layers(config):
            super().__init__(config)
        self.model = HCLlamaModel(config)
        self.post_init()


class HCLlamaForSequenceClassification(HCLlamaPreTrainedModel, LlamaForSequenceClassification):
    """`LlamaForSequenceClassification` with hyper-connections."""

    def __init__(self, config: HCLlamaConfig):
        AutoModel.register(type(config), HCLlamaModel, exist_ok=True)  # the head asks AutoModel for its base
        super().__init__(config)


class HCLlamaForTokenClassification(HCLlamaPreTrainedModel, LlamaForTokenClassification):
    """`LlamaForTokenClassification` with hyper-connections."""

    def __init__(self, config: HCLlamaConfig):
        AutoModel.register(type(config), HCLlamaModel, exist_ok=True)
        super().__init__(config)


class HCLlamaForQuestionAnswering(HCLlamaPreTrainedModel, LlamaForQuestionAnswering):
    """`LlamaForQuestionAnswering` with hyper-connections."""

    def __init__(self, config: HCLlamaConfig):
        AutoModel.register(type(config), HCLlamaModel, exist_ok=True)
        super().__init__(config)


__all__ = [
    "HCLlamaForCausalLM",
    "HCLlamaForQuestionAnswering",
    "HCLlamaForSequenceClassification",
    "HCLlamaForTokenClassification",
    "HCLlamaModel",
    "HCLlamaPreTrainedModel",
]
