# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""All uses of Transformers without a promise that they stay.

For a missing convenience there is one warning. Without the names of weights on disk a model could be wrong, so that is
an error.
"""

import re
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
import transformers
from transformers import PreTrainedConfig
from transformers.utils import logging

if TYPE_CHECKING:
    from transformers import PreTrainedModel  # takes seconds, and is not needed to register models

logger = logging.get_logger(__name__)

# declarations of a model class, and the loss when Transformers no longer reads them
DECLARED = {
    "_no_split_modules": "device_map may split a decoder layer",
    "_keep_in_fp32_modules_strict": "hyper-connections are loaded in the dtype of the model, not in float32",
}

# Transformers' tables of processors, and of their parts, by the class of a config
PROCESSORS = {
    "processing_auto": "PROCESSOR_MAPPING",
    "image_processing_auto": "IMAGE_PROCESSOR_MAPPING",
    "video_processing_auto": "VIDEO_PROCESSOR_MAPPING",
    "feature_extraction_auto": "FEATURE_EXTRACTOR_MAPPING",
}

# LoRA's targets where PEFT has none for the base: the modules that make queries and values, as for most types
LORA_TARGETS = {
    **dict.fromkeys(("granite", "olmo", "olmo2", "olmo3", "seed_oss", "smollm3", "starcoder2"), ["q_proj", "v_proj"]),
    **dict.fromkeys(("gpt_oss", "olmoe", "qwen2_moe", "qwen3_moe"), ["q_proj", "v_proj"]),
    "deepseek_v3": ["q_proj", "q_b_proj", "kv_b_proj"],
    "phi3": ["qkv_proj"],
}

LORA_TABLE = "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"


def missing_names_error(error: ImportError) -> ImportError:
    """Return the error for missing classes of Transformers in a model's code."""
    return ImportError(
        f"Transformers {transformers.__version__} lacks a class of this model's code ({error}). "
        f"Install the release that config.json names as transformers_version; or bring the code up to date, by "
        f"`pip install hf_hyperconn` and `hf-hyperconn refresh` of the folder."
    )


def base_config_error(model: Any) -> ImportError:
    """Return the error for a model that Transformers builds with a config of its base."""
    return ImportError(
        f"the installed Transformers builds {type(model).__name__} with a {type(model.config).__name__}, which has no "
        f"fields of hyper-connections. Install the release that config.json names as transformers_version."
    )


def convenience(lost: str) -> Callable:
    """Wrap a function of names that may be missing: without them one warning names the loss."""

    def decorated(function: Callable) -> Callable:
        @wraps(function)
        def wrapper(*args):
            try:
                function(*args)
            except (ImportError, AttributeError, TypeError) as error:
                logger.warning_once(f"Transformers {transformers.__version__} has changed ({error}): {lost}.")

        return wrapper

    return decorated


@convenience("AutoTokenizer may not find the tokenizer of a hyper-connection model's base")
def share_tokenizer(model_type: str, base_model_type: str) -> None:
    """Let AutoTokenizer, which looks up a tokenizer's class by model type, find the base's."""
    from transformers.models.auto import tokenization_auto

    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    overruled = tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    if base_model_type in names:
        names[model_type] = names[base_model_type]
    if base_model_type in overruled:
        overruled.add(model_type)


@convenience("Trainer and pipelines may not know the task of a hyper-connection model")
def share_class_names(model_type: str, base_model_type: str) -> None:
    """Put a type's classes in the tables by which Trainer shifts smoothed labels and pipelines know their models."""
    from transformers.models.auto import modeling_auto

    for variable, names in vars(modeling_auto).items():
        if re.fullmatch("MODEL_.*MAPPING_NAMES", variable) and base_model_type in names:
            of_base = names[base_model_type]
            ours = f"HC{of_base}" if isinstance(of_base, str) else tuple(f"HC{name}" for name in of_base)
            names.setdefault(model_type, ours)


@convenience("AutoProcessor may not find the processors of a hyper-connection model's base")
def share_processors(config_name: str, base_model_type: str) -> None:
    """Let AutoProcessor and others, which look up a class by the config's class, find the base's."""
    for module, table in PROCESSORS.items():
        names = getattr(import_module(f"transformers.models.auto.{module}"), table)._reverse_config_mapping
        names.setdefault(config_name, base_model_type)


@convenience("PEFT may not translate the names of experts in adapters of older releases")
def share_names_of_experts(model_type: str, base_model_type: str) -> None:
    """Put the type in Transformers' table of types whose experts have other names on disk, which PEFT copies."""
    from transformers import conversion_mapping

    patterns = conversion_mapping._MODEL_TO_CONVERSION_PATTERN
    if base_model_type in patterns:
        patterns.setdefault(model_type, patterns[base_model_type])
    if base_model_type == "mixtral":  # the name of the pattern, which only PEFT's table has as a type
        patterns.setdefault(model_type, base_model_type)


def share_tables(model_type: str, base_model_type: str) -> None:
    """Copy the base's entries in the tables of tools to a type, with targets of LoRA where there are none.

    Entries of the type itself stay.
    """
    for table in _tables_of_tools():
        if base_model_type in table:
            table.setdefault(model_type, table[base_model_type])
    constants = sys.modules.get("peft.utils.constants")
    if base_model_type in LORA_TARGETS and hasattr(constants, LORA_TABLE):
        getattr(constants, LORA_TABLE).setdefault(model_type, LORA_TARGETS[base_model_type])


class SharedType:
    """The model type of a class of configs; reading it adds it to the tables of tools.

    A tool reads the type before it looks it up, and may be imported after the class was made.
    """

    def __init__(self, model_type: str, base_model_type: str):
        self.model_type, self.base_model_type = model_type, base_model_type

    def __get__(self, config: Any, config_class: Any) -> str:
        share_tables(self.model_type, self.base_model_type)
        return self.model_type if config is None else vars(config).get("model_type", self.model_type)

    def __set__(self, config: Any, model_type: str) -> None:  # from config.json, by Transformers
        vars(config)["model_type"] = model_type


def share_lookups(config_class: Any) -> None:
    """Let tools that look up a model type, or a class of configs, find the base's entries."""
    model_type, base_model_type = config_class.model_type, config_class.base_model_type
    share_tokenizer(model_type, base_model_type)
    share_processors(config_class.__name__, base_model_type)
    share_class_names(model_type, base_model_type)
    share_names_of_experts(model_type, base_model_type)
    config_class.model_type = SharedType(model_type, base_model_type)
    if base_model_type == "hyperclovax":  # TRL multiplies logits by this scale; by model type it would divide them
        config_class.logit_scale = property(lambda config: config.logits_scaling)


@convenience("set_experts_implementation has no effect")
def share_implementation_of_experts(cls: "type[PreTrainedModel]", base: "type[PreTrainedModel]") -> None:
    """Copy from the base whether experts can be set, which Transformers reads in a class's source file."""
    shared: Any = cls
    shared._can_set_experts_implementation_cached_value = base._can_set_experts_implementation()


def share_names_of_weights(model_type: str, base_model_type: str) -> None:
    """Translate names of weights in checkpoints as for the base; a type is a model type or a class name.

    Raises `ImportError` if Transformers has no such translation: weights would be left out.
    """
    try:
        from transformers.conversion_mapping import (
            get_checkpoint_conversion_mapping,
            register_checkpoint_conversion_mapping,
        )

        if (mapping := get_checkpoint_conversion_mapping(base_model_type)) is not None:
            transforms = list(map(_with_literal_dots, mapping))
            register_checkpoint_conversion_mapping(model_type, transforms, overwrite=True)
    except (ImportError, AttributeError, TypeError) as error:
        raise ImportError(
            f"Transformers {transformers.__version__} has no translation of weights' names as this code knows it "
            f"({error}), so it can't load checkpoints of {base_model_type!r}. Install an older Transformers, such as "
            f"the one that config.json names, or a newer hf_hyperconn and run `hf-hyperconn refresh` on the folder."
        ) from error


def declare(cls: "type[PreTrainedModel]", name: str, modules: list[str]) -> None:
    """Set a declaration of a model class, and warn once where Transformers no longer reads it."""
    if not hasattr(transformers.PreTrainedModel, name):
        lost = DECLARED[name]
        logger.warning_once(f"Transformers {transformers.__version__} has changed (no {name}): {lost}.")
    setattr(cls, name, modules)


def dtypes_in(state_dict: dict[str, torch.Tensor] | None, files: list[str] | None) -> dict[str, torch.dtype]:
    """Return the dtype of each tensor that Transformers will load, by its name; none for an unreadable file."""
    try:
        from transformers.modeling_utils import load_state_dict

        whole = [file for file in files or () if str(file).endswith(".safetensors")]
        states = [state_dict] if state_dict is not None else [load_state_dict(file, "meta") for file in whole]
        return {name: tensor.dtype for state in states for name, tensor in state.items()}
    except Exception:  # the loading itself refuses a broken file
        return {}


def implementations(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the implementations of attention and experts of a config, as arguments of its constructor."""
    names = ("attn_implementation", "experts_implementation")
    return {name: getattr(config, f"_{name}", None) for name in names}


def _tables_of_tools() -> Iterator[dict]:
    """Iterate over tables by model type: PEFT's, Liger's, and LLaMA-Factory's of models with a vision tower."""
    for module_name, prefix in (
        ("peft.utils.transformers_weight_conversion", "_MODEL_TO_CONVERSION_PATTERN"),
        ("peft.tuners.adaption_prompt.config", "TRANSFORMERS_MODEL_CONFIG"),
        ("peft.utils.constants", "TRANSFORMERS_MODELS_TO_"),
        ("liger_kernel.transformers.monkey_patch", "MODEL_TYPE_TO_APPLY_LIGER_FN"),
        ("llamafactory.model.model_utils.visual", "COMPOSITE_MODELS"),
    ):
        if (module := sys.modules.get(module_name)) is not None:
            yield from [table for name, table in [*vars(module).items()] if name.startswith(prefix)]


def _with_literal_dots(transform):
    """Return a transform of checkpoint names, in which the `.` of `.mlp.` does not match the `_` of `mlp_hc`."""
    from transformers.core_model_loading import WeightRenaming

    if not isinstance(transform, WeightRenaming):
        return transform
    sides = (transform._original_source_patterns, transform._original_target_patterns)
    return WeightRenaming(*([re.sub(r"(?<!\\)\.(?![*+?])", r"\.", pattern) for pattern in side] for side in sides))
