# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of OLMo 2 with hyper-connections."""

from huggingface_hub.dataclasses import strict
from transformers.models.olmo2.configuration_olmo2 import Olmo2Config

from .configuration_hyper_connections import HyperConnectionConfig


@strict
class HCOlmo2Config(HyperConnectionConfig, Olmo2Config):
    """An `Olmo2Config` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_olmo2"
    base_model_type = "olmo2"


__all__ = ["HCOlmo2Config"]
