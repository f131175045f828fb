# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of Granite with hyper-connections."""

from huggingface_hub.dataclasses import strict
from transformers.models.granite.configuration_granite import GraniteConfig

from .configuration_hyper_connections import HyperConnectionConfig


@strict
class HCGraniteConfig(HyperConnectionConfig, GraniteConfig):
    """A `GraniteConfig` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_granite"
    base_model_type = "granite"


__all__ = ["HCGraniteConfig"]
