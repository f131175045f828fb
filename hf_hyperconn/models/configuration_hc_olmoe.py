# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of Olmoe with hyper-connections."""

from huggingface_hub.dataclasses import strict

from .configuration_hyper_connections import HyperConnectionConfig
from .transformers_seam import names_are_gone

try:
    from transformers.models.olmoe.configuration_olmoe import OlmoeConfig
except ImportError as error:
    raise names_are_gone(error) from error


@strict
class HCOlmoeConfig(HyperConnectionConfig, OlmoeConfig):
    """`OlmoeConfig` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_olmoe"
    base_model_type = "olmoe"


__all__ = ["HCOlmoeConfig"]
