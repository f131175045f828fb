# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of GPT-OSS with hyper-connections."""

from huggingface_hub.dataclasses import strict
from transformers.models.gpt_oss.configuration_gpt_oss import GptOssConfig

from .configuration_hyper_connections import HyperConnectionConfig


@strict
class HCGptOssConfig(HyperConnectionConfig, GptOssConfig):
    """A `GptOssConfig` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_gpt_oss"
    base_model_type = "gpt_oss"


__all__ = ["HCGptOssConfig"]
