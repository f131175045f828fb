# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of Llama with hyper-connections."""

from huggingface_hub.dataclasses import strict

from .configuration_hyper_connections import HyperConnectionConfig
from .transformers_seam import missing_names_error

try:
    from transformers.models.llama.configuration_llama import LlamaConfig
except ImportError as error:
    raise missing_names_error(error) from error


@strict
class HCLlamaConfig(HyperConnectionConfig, LlamaConfig):
    """`LlamaConfig` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_llama"
    base_model_type = "llama"


__all__ = ["HCLlamaConfig"]
