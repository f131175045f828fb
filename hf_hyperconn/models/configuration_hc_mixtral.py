# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of Mixtral with hyper-connections."""

from huggingface_hub.dataclasses import strict
from transformers.models.mixtral.configuration_mixtral import MixtralConfig

from .configuration_hyper_connections import HyperConnectionConfig


@strict
class HCMixtralConfig(HyperConnectionConfig, MixtralConfig):
    """A `MixtralConfig` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_mixtral"
    base_model_type = "mixtral"


__all__ = ["HCMixtralConfig"]
