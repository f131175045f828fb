# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of Phi-3 with hyper-connections."""

from huggingface_hub.dataclasses import strict
from transformers.models.phi3.configuration_phi3 import Phi3Config

from .configuration_hyper_connections import HyperConnectionConfig


@strict
class HCPhi3Config(HyperConnectionConfig, Phi3Config):
    """A `Phi3Config` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_phi3"
    base_model_type = "phi3"


__all__ = ["HCPhi3Config"]
