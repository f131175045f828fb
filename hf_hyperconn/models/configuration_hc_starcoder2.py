# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of StarCoder2 with hyper-connections."""

from huggingface_hub.dataclasses import strict
from transformers.models.starcoder2.configuration_starcoder2 import Starcoder2Config

from .configuration_hyper_connections import HyperConnectionConfig


@strict
class HCStarcoder2Config(HyperConnectionConfig, Starcoder2Config):
    """A `Starcoder2Config` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_starcoder2"
    base_model_type = "starcoder2"


__all__ = ["HCStarcoder2Config"]
