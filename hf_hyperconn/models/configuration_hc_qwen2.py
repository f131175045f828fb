# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of Qwen2 with hyper-connections."""

from huggingface_hub.dataclasses import strict
from transformers.models.qwen2.configuration_qwen2 import Qwen2Config

from .configuration_hyper_connections import HyperConnectionConfig


@strict
class HCQwen2Config(HyperConnectionConfig, Qwen2Config):
    """A `Qwen2Config` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_qwen2"
    base_model_type = "qwen2"


__all__ = ["HCQwen2Config"]
