# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of SmolLM3 with hyper-connections."""

from huggingface_hub.dataclasses import strict
from transformers.models.smollm3.configuration_smollm3 import SmolLM3Config

from .configuration_hyper_connections import HyperConnectionConfig


@strict
class HCSmolLM3Config(HyperConnectionConfig, SmolLM3Config):
    """A `SmolLM3Config` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_smollm3"
    base_model_type = "smollm3"


__all__ = ["HCSmolLM3Config"]
