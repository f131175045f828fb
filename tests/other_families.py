"""Tiny models of the families that are tested beside those of `families.py`, made by a rule."""

import dataclasses
from functools import cache

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_hyperconn.families import TESTED

from .families import FAMILIES

# asked of every config that knows the field
FIELDS = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "sliding_window": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "query_pre_attn_scalar": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT_ATTENTION = ["axk1", "axk2", "deepseek_v2", "deepseek_v32", "glm4_moe_lite", "minicpm3", "youtu"]
COMMON = [
    "apertus",
    "deepseek_v2",
    "ernie4_5",
    "exaone4",
    "gemma3_text",
    "glm4",
    "granitemoe",
    "minimax_m2",
    "nemotron",
]
LONG_TAIL = [model_type for model_type in TESTED if model_type not in FAMILIES]
long_tail = pytest.mark.parametrize(
    "model_type", [name if name in COMMON else pytest.param(name, marks=pytest.mark.slow) for name in LONG_TAIL]
)


@cache
def tiny(model_type: str) -> PreTrainedModel:
    """A random model, in evaluation mode; tests must not change it."""
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"this Transformers has no {model_type}")
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(config_class)} | set(dir(config_class))
    config = config_class(**{name: value for name, value in FIELDS.items() if name in known})
    if model_type in LATENT_ATTENTION:
        config.num_key_value_heads = config.num_attention_heads
    torch.manual_seed(0)
    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model
