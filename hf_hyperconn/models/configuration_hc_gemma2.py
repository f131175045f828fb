# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of Gemma 2 with hyper-connections."""

from huggingface_hub.dataclasses import strict
from transformers.models.gemma2.configuration_gemma2 import Gemma2Config

from .configuration_hyper_connections import HyperConnectionConfig


@strict
class HCGemma2Config(HyperConnectionConfig, Gemma2Config):
    """A `Gemma2Config` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_gemma2"
    base_model_type = "gemma2"


__all__ = ["HCGemma2Config"]
