# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Configuration of Seed-OSS with hyper-connections."""

from huggingface_hub.dataclasses import strict
from transformers.models.seed_oss.configuration_seed_oss import SeedOssConfig

from .configuration_hyper_connections import HyperConnectionConfig


@strict
class HCSeedOssConfig(HyperConnectionConfig, SeedOssConfig):
    """A `SeedOssConfig` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_seed_oss"
    base_model_type = "seed_oss"


__all__ = ["HCSeedOssConfig"]
