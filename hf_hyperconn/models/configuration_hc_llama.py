# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of Llama with hyper-connections."""

from huggingface_hub.dataclasses import strict
from transformers.models.llama.configuration_llama import LlamaConfig

from .configuration_hyper_connections import HyperConnectionConfig


@strict
class HCLlamaConfig(HyperConnectionConfig, LlamaConfig):
    """`LlamaConfig` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_llama"
    base_model_type = "llama"


__all__ = ["HCLlamaConfig"]
