# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of DeepSeek-V3 with hyper-connections."""

from huggingface_hub.dataclasses import strict
from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config

from .configuration_hyper_connections import HyperConnectionConfig


@strict
class HCDeepseekV3Config(HyperConnectionConfig, DeepseekV3Config):
    """A `DeepseekV3Config` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_deepseek_v3"
    base_model_type = "deepseek_v3"


__all__ = ["HCDeepseekV3Config"]
