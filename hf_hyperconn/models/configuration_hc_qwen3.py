# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of Qwen3 with hyper-connections."""

from huggingface_hub.dataclasses import strict
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from .configuration_hyper_connections import HyperConnectionConfig


@strict
class HCQwen3Config(HyperConnectionConfig, Qwen3Config):
    """A `Qwen3Config` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_qwen3"
    base_model_type = "qwen3"


__all__ = ["HCQwen3Config"]
