# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""What training tools look up by model type: a hyper-connection type has what its base has.

Nothing here imports these tools: their tables are filled once something else has imported them.
"""

import sys
from collections.abc import Iterator
from typing import Any

from .transformers_seam import share_names_of_experts

# what makes queries and values, which are LoRA's targets for most types, where PEFT has none for the base
LORA_TARGETS = {
    **dict.fromkeys(("granite", "olmo", "olmo2", "olmo3", "seed_oss", "smollm3", "starcoder2"), ["q_proj", "v_proj"]),
    **dict.fromkeys(("gpt_oss", "olmoe", "qwen2_moe", "qwen3_moe"), ["q_proj", "v_proj"]),
    "deepseek_v3": ["q_proj", "q_b_proj", "kv_b_proj"],
    "phi3": ["qkv_proj"],
}

LORA_TABLE = "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"


def share_peft_defaults(model_type: str, base_model_type: str) -> None:
    """Give `model_type` what `base_model_type` has in PEFT's tables, and targets of LoRA where there are none.

    Called when the classes of a type are made, in time for PEFT to translate the experts' names in old adapters, and
    whenever PEFT reads a config, in time for everything else. Entries that are there stay.
    """
    share_names_of_experts(model_type, base_model_type)
    for table in _tables():
        if base_model_type in table:
            table.setdefault(model_type, table[base_model_type])
    constants = sys.modules.get("peft.utils.constants")
    if base_model_type in LORA_TARGETS and hasattr(constants, LORA_TABLE):
        getattr(constants, LORA_TABLE).setdefault(model_type, LORA_TARGETS[base_model_type])


def tell_scale_of_logits(config_class: Any, base_model_type: str) -> None:
    """Let TRL multiply the logits of HyperCLOVA X by their scale; by its model type it would divide them."""
    if base_model_type == "hyperclovax":
        config_class.logit_scale = property(lambda config: config.logits_scaling)


def _tables() -> Iterator[dict]:
    """Every table by model type that PEFT has, and LLaMA-Factory's of models with a vision tower."""
    for module_name, prefix in (
        ("peft.utils.transformers_weight_conversion", "_MODEL_TO_CONVERSION_PATTERN"),
        ("peft.tuners.adaption_prompt.config", "TRANSFORMERS_MODEL_CONFIG"),
        ("peft.utils.constants", "TRANSFORMERS_MODELS_TO_"),
        ("llamafactory.model.model_utils.visual", "COMPOSITE_MODELS"),
    ):
        if (module := sys.modules.get(module_name)) is not None:
            yield from [table for name, table in vars(module).items() if name.startswith(prefix)]
