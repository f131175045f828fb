# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of Gemma with hyper-connections."""

from huggingface_hub.dataclasses import strict
from transformers.models.gemma.configuration_gemma import GemmaConfig

from .configuration_hyper_connections import HyperConnectionConfig


@strict
class HCGemmaConfig(HyperConnectionConfig, GemmaConfig):
    """A `GemmaConfig` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_gemma"
    base_model_type = "gemma"


__all__ = ["HCGemmaConfig"]
