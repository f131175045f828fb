# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of OLMo 3 with hyper-connections."""

from huggingface_hub.dataclasses import strict
from transformers.models.olmo3.configuration_olmo3 import Olmo3Config

from .configuration_hyper_connections import HyperConnectionConfig


@strict
class HCOlmo3Config(HyperConnectionConfig, Olmo3Config):
    """An `Olmo3Config` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_olmo3"
    base_model_type = "olmo3"


__all__ = ["HCOlmo3Config"]
