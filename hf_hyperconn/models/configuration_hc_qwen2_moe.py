# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of Qwen2-MoE with hyper-connections."""

from huggingface_hub.dataclasses import strict
from transformers.models.qwen2_moe.configuration_qwen2_moe import Qwen2MoeConfig

from .configuration_hyper_connections import HyperConnectionConfig


@strict
class HCQwen2MoeConfig(HyperConnectionConfig, Qwen2MoeConfig):
    """A `Qwen2MoeConfig` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_qwen2_moe"
    base_model_type = "qwen2_moe"


__all__ = ["HCQwen2MoeConfig"]
