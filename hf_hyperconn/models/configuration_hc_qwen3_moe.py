# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of Qwen3-MoE with hyper-connections."""

from huggingface_hub.dataclasses import strict
from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig

from .configuration_hyper_connections import HyperConnectionConfig


@strict
class HCQwen3MoeConfig(HyperConnectionConfig, Qwen3MoeConfig):
    """A `Qwen3MoeConfig` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_qwen3_moe"
    base_model_type = "qwen3_moe"


__all__ = ["HCQwen3MoeConfig"]
