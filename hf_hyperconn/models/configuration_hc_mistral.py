# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of Mistral with hyper-connections."""

from huggingface_hub.dataclasses import strict
from transformers.models.mistral.configuration_mistral import MistralConfig

from .configuration_hyper_connections import HyperConnectionConfig


@strict
class HCMistralConfig(HyperConnectionConfig, MistralConfig):
    """A `MistralConfig` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_mistral"
    base_model_type = "mistral"


__all__ = ["HCMistralConfig"]
