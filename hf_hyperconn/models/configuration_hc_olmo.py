# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of OLMo with hyper-connections."""

from huggingface_hub.dataclasses import strict
from transformers.models.olmo.configuration_olmo import OlmoConfig

from .configuration_hyper_connections import HyperConnectionConfig


@strict
class HCOlmoConfig(HyperConnectionConfig, OlmoConfig):
    """An `OlmoConfig` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_olmo"
    base_model_type = "olmo"


__all__ = ["HCOlmoConfig"]
