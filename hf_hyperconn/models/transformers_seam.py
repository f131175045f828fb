# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""All that this code touches of Transformers without a promise that it stays, and what happens where it is gone.

A convenience is left out, with one warning. Without the names of weights on disk a model could come out wrong, so that
is an error.
"""

import re
import sys
from collections.abc import Callable, Iterator
from functools import wraps
from importlib import import_module
from typing import Any

import torch
import transformers
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

logger = logging.get_logger(__name__)

# what a model class declares, and what is lost when Transformers no longer asks for it
DECLARED = {
    "_no_split_modules": "device_map may split a decoder layer",
    "_keep_in_fp32_modules_strict": "hyper-connections are loaded in the dtype of the model, not in float32",
}

# where Transformers keeps which class a config's processor, or a part of it, has
PROCESSORS = {
    "processing_auto": "PROCESSOR_MAPPING",
    "image_processing_auto": "IMAGE_PROCESSOR_MAPPING",
    "video_processing_auto": "VIDEO_PROCESSOR_MAPPING",
    "feature_extraction_auto": "FEATURE_EXTRACTOR_MAPPING",
}

# what makes queries and values, which are LoRA's targets for most types, where PEFT has none for the base
LORA_TARGETS = {
    **dict.fromkeys(("granite", "olmo", "olmo2", "olmo3", "seed_oss", "smollm3", "starcoder2"), ["q_proj", "v_proj"]),
    **dict.fromkeys(("gpt_oss", "olmoe", "qwen2_moe", "qwen3_moe"), ["q_proj", "v_proj"]),
    "deepseek_v3": ["q_proj", "q_b_proj", "kv_b_proj"],
    "phi3": ["qkv_proj"],
}

LORA_TABLE = "TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING"

EXPERTS_ARE_SETTABLE = "_can_set_experts_implementation_cached_value"  # where Transformers keeps what it found


def names_are_gone(error: ImportError) -> ImportError:
    """What to raise when Transformers no longer has the classes that a model's code is made from."""
    return ImportError(
        f"Transformers {transformers.__version__} no longer has what this model's code is made from ({error}). "
        f"Install the release that config.json names as transformers_version; or bring the code up to date, by "
        f"`pip install hf_hyperconn` and `hf-hyperconn refresh` of the folder."
    )


def plain_config(model: Any) -> ImportError:
    """What to raise for a model that the installed Transformers builds with a config of its base."""
    return ImportError(
        f"the installed Transformers builds {type(model).__name__} with a {type(model.config).__name__}, which has no "
        f"fields of hyper-connections. Install the release that config.json names as transformers_version."
    )


def convenience(lost: str) -> Callable:
    """Make a function do nothing, and say once what is `lost`, where what it touches is gone."""

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
    """Let AutoTokenizer, which looks a tokenizer's class up by model type, find the base's."""
    from transformers.models.auto import tokenization_auto

    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    overruled = tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    if base_model_type in names:
        names[model_type] = names[base_model_type]
    if base_model_type in overruled:
        overruled.add(model_type)


@convenience("Trainer and pipelines may not know what a hyper-connection model is made for")
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
    """Let AutoProcessor and its like, which look a class up by that of the config, find the base's."""
    for module, table in PROCESSORS.items():
        names = getattr(import_module(f"transformers.models.auto.{module}"), table)._reverse_config_mapping
        names.setdefault(config_name, base_model_type)


@convenience("PEFT may not translate the names of experts in adapters of older releases")
def share_names_of_experts(model_type: str, base_model_type: str) -> None:
    """Put the type in Transformers' table of those whose experts have other names on disk, which PEFT copies."""
    from transformers import conversion_mapping

    patterns = conversion_mapping._MODEL_TO_CONVERSION_PATTERN
    if base_model_type in patterns:
        patterns.setdefault(model_type, patterns[base_model_type])
    if base_model_type == "mixtral":  # the pattern itself, which only PEFT lists among the types that follow it
        patterns.setdefault(model_type, base_model_type)


def share_peft_defaults(model_type: str, base_model_type: str) -> None:
    """Give `model_type` what `base_model_type` has in PEFT's tables, and targets of LoRA where there are none.

    Called when the classes of a type are made, in time for PEFT to translate the experts' names in old adapters, and
    whenever PEFT reads a config, in time for everything else. Entries that are there stay.
    """
    share_names_of_experts(model_type, base_model_type)
    for table in _tables_of_tools():
        if base_model_type in table:
            table.setdefault(model_type, table[base_model_type])
    constants = sys.modules.get("peft.utils.constants")
    if base_model_type in LORA_TARGETS and hasattr(constants, LORA_TABLE):
        getattr(constants, LORA_TABLE).setdefault(model_type, LORA_TARGETS[base_model_type])


def tell_scale_of_logits(config_class: Any, base_model_type: str) -> None:
    """Let TRL multiply the logits of HyperCLOVA X by their scale; by its model type it would divide them."""
    if base_model_type == "hyperclovax":
        config_class.logit_scale = property(lambda config: config.logits_scaling)


@convenience("set_experts_implementation has no effect")
def share_implementation_of_experts(cls: type[PreTrainedModel], base: type[PreTrainedModel]) -> None:
    """Whether the implementation of experts can be set, which is found in the source file of a class: the base's."""
    setattr(cls, EXPERTS_ARE_SETTABLE, base._can_set_experts_implementation())


def share_names_of_weights(model_type: str, base_model_type: str) -> None:
    """Translate names of weights in checkpoints as for the base; types are those of configs, or names of classes.

    Raises `ImportError` where Transformers has no such translation any more: weights would be left out.
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


def declare(cls: type[PreTrainedModel], base: type[PreTrainedModel], **values) -> None:
    """Set what a model class declares to Transformers, and say once when it no longer asks for something.

    base: the class that declares it for the base.
    values: each a function of the base's value.
    """
    for name, value in values.items():
        if not hasattr(PreTrainedModel, name):
            lost = DECLARED[name]
            logger.warning_once(f"Transformers {transformers.__version__} has changed (no {name}): {lost}.")
        setattr(cls, name, value(getattr(base, name, None)))


def dtypes_in(state_dict: dict[str, torch.Tensor] | None, files: list[str] | None) -> dict[str, torch.dtype]:
    """The dtype of each tensor that Transformers is about to load, by its name; none where it can't be read so."""
    try:
        from transformers.modeling_utils import load_state_dict

        whole = [file for file in files or () if str(file).endswith(".safetensors")]
        states = [state_dict] if state_dict is not None else [load_state_dict(file, "meta") for file in whole]
        return {name: tensor.dtype for state in states for name, tensor in state.items()}
    except Exception:  # whatever a broken file raises, which the loading itself refuses
        return {}


def implementations(config: PreTrainedConfig) -> dict[str, Any]:
    """The implementations of attention and experts that were chosen for a config, as its constructor takes them."""
    names = ("attn_implementation", "experts_implementation")
    return {name: getattr(config, f"_{name}", None) for name in names}


def _tables_of_tools() -> Iterator[dict]:
    """Every table by model type that PEFT has, and LLaMA-Factory's of models with a vision tower."""
    for module_name, prefix in (
        ("peft.utils.transformers_weight_conversion", "_MODEL_TO_CONVERSION_PATTERN"),
        ("peft.tuners.adaption_prompt.config", "TRANSFORMERS_MODEL_CONFIG"),
        ("peft.utils.constants", "TRANSFORMERS_MODELS_TO_"),
        ("llamafactory.model.model_utils.visual", "COMPOSITE_MODELS"),
    ):
        if (module := sys.modules.get(module_name)) is not None:
            yield from [table for name, table in vars(module).items() if name.startswith(prefix)]


def _with_literal_dots(transform):
    """The transform of checkpoint names, where a `.` in `.mlp.` no longer matches the `_` of `mlp_hc`."""
    from transformers.core_model_loading import WeightRenaming

    if not isinstance(transform, WeightRenaming):
        return transform
    sides = (transform._original_source_patterns, transform._original_target_patterns)
    return WeightRenaming(*([re.sub(r"(?<!\\)\.(?![*+?])", r"\.", pattern) for pattern in side] for side in sides))
