"""Tiny models, by a rule, of the families that are tested beside those of `families.py`, and their inputs."""

import dataclasses
import re
from functools import cache
from itertools import islice

import pytest
import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

import hf_hyperconn
from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.families.family import find_family
from hf_hyperconn.families.reading.classes import FamilyName

from .families import FAMILIES
from .model_inputs import kind_that_runs, kinds_of_inputs
from .pages import read
from .tested import TESTED

RELEASE = re.search(r"^transformers==([\d.]+)", read("constraints.txt"), re.MULTILINE)[1]

# values of fields, for every config that has the field
FIELDS = {
    "vocab_size": 96,
    "vocab_size_per_layer_input": 96,
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
    "state_size": 8,
    "num_heads": 8,
    "n_groups": 1,
    "chunk_size": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 8,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "index_n_heads": 4,
    "index_head_dim": 8,
    "index_topk": 8,
    "image_size": 16,
    "patch_size": 4,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 4,
    "encoder_num_hidden_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_num_attention_heads": 4,
    "decoder_num_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "ffn_dim": 48,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 64,
    "input_feat_per_channel": 8,
    "conv_channels": 16,
    "decoder_start_token_id": 1,
    "init_std": 0.2,
    "num_frames": 4,
    "frames_per_clip": 4,
    "in_channels": 3,
    "depth": 4,
    "embed_dim": 32,
    "spatial_merge_size": 2,
    "out_hidden_size": 32,
    "attn_layer_period": 2,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "mamba_num_heads": 8,
    "mamba_head_dim": 8,
    "ssm_state_size": 8,
    "mamba_d_ssm": 64,
}
MROPE = {
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 1.0,
    }
}
BY_LAYER = {"rope_type": "default", "rope_theta": 10000.0}
LIKE_T5 = {"decoder_start_token_id": 0, "num_decoder_layers": 4, "d_kv": 8, "d_ff": 48}
# further values for a family
OF_ITS_OWN = {
    "codegen": {"rotary_dim": 4},
    "gptj": {"rotary_dim": 4},
    "glm4v_text": MROPE,
    "glm4v_moe_text": MROPE,
    "glm_image_text": MROPE,
    "glm_ocr_text": MROPE,
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 8},
    "cosmos3_edge_text": MROPE,
    "paddleocr_vl_text": MROPE,
    "qwen3_vl_text": MROPE,
    "qwen3_vl_moe_text": MROPE,
    "qwen3_omni_moe_text": MROPE,
    "ernie4_5_vl_moe_text": {
        "rope_parameters": MROPE["rope_parameters"] | {"mrope_section": [1, 1, 2]},
        "moe_intermediate_size": [16, 16],
    },
    "hunyuan_vl_text": MROPE,
    "qwen2_5_omni_text": MROPE,
    **dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_omni_moe_thinker"), {"vision_start_token_id": 90}),
    "diffusion_gemma_text": {"top_k_experts": 2},
    **dict.fromkeys(
        ("cohere_compass", "cohere_compass_text"),
        {"rope_parameters": {"full_attention": BY_LAYER, "sliding_attention": BY_LAYER}},
    ),
    **dict.fromkeys(("deepseek_ocr2", "deepseek_ocr2_text"), {"mlp_layer_types": ["dense", *["sparse"] * 3]}),
    "audio-spectrogram-transformer": {"max_length": 64},
    "molmo2": {"adapter_config": {"vision_feature_layer": [3, 1]}},
    "molmo2_vision": {"image_size": [16, 16]},
    "kosmos-2": {"latent_query_num": 4},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 8.0}, "n_heads": 4, "n_layers": 4},
    "qwen2_vl_text": MROPE,
    "qwen2_5_vl_text": MROPE,
    **dict.fromkeys(("t5", "mt5", "umt5", "switch_transformers"), LIKE_T5),
    "dpt": {"backbone_config": None},
    "vivit": {"tubelet_size": [2, 4, 4]},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"] * 2},
    "bailing_hybrid": {"layer_types": [*["linear_attention"] * 3, "full_attention"]},
    "kimi_linear": {"layer_types": [*["linear_attention"] * 3, "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
}
KEYS_FOR_EACH_HEAD = [
    *("axk1", "axk2", "bailing_hybrid", "deepseek_v2", "deepseek_v3", "deepseek_v32", "dots3_note_text", "esmc"),
    *("glm4_moe_lite", "glm_moe_dsa", "kimi_linear", "longcat_flash", "minicpm3", "mistral4", "mistral_large4_text"),
    "youtu",
]
COMMON = ["gemma4_text", "gpt2", "mamba", "phi", "t5", "vit"]
# they stand for a form of layers, or of models around them; Kimi Linear's tests take minutes, and are left to the tail
OF_EACH_FORM = [
    *("afmoe", "axk2", "beit", "bloom", "clip", "dinov2", "esm", "falcon_h1", "glm4", "gpt_neox", "jamba"),
    *("llama4_text", "llava", "mamba2", "mbart", "modernbert", "opt", "qwen2_5_vl", "qwen3_next"),
    *("recurrent_gemma", "stablelm", "switch_transformers", "whisper"),
]
LONG_TAIL = [model_type for model_type in TESTED if model_type not in FAMILIES]


def _with_marks(model_type: str):
    slow = [] if model_type in COMMON else [pytest.mark.slow]
    return pytest.param(model_type, marks=slow if model_type in COMMON + OF_EACH_FORM else [*slow, pytest.mark.tail])


long_tail = pytest.mark.parametrize("model_type", [_with_marks(model_type) for model_type in LONG_TAIL])


@cache
def tiny(family_name: str) -> PreTrainedModel:
    """A random model, in evaluation mode; tests must not change it.

    family_name: its model type, or one of `FamilyName`.
    """
    model_type = FamilyName.of(family_name).own
    if model_type not in CONFIG_MAPPING:
        pytest.skip(f"this Transformers has no {model_type}")
    try:
        family = find_family(family_name)
    except UnsupportedCheckpointError as error:
        if transformers.__version__ == RELEASE:
            raise
        pytest.skip(f"this Transformers writes {model_type} in another form: {error}")
    config = CONFIG_MAPPING[model_type](**fields_of(model_type))
    torch.manual_seed(0)
    model = family.base_class(family.usual_architecture)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def fields_of(model_type: str) -> dict:
    """Values for the fields of a config, and of the configs in it."""
    config_class = CONFIG_MAPPING[model_type]
    own = {field.name for field in dataclasses.fields(config_class)}
    known = {*own, *dir(config_class), *config_class.attribute_map}
    fields = {}
    for name, value in FIELDS.items():
        of_class = getattr(config_class, name, None)
        if name in known and (not isinstance(of_class, property) or of_class.fset):
            fields[name] = value
    if model_type in KEYS_FOR_EACH_HEAD:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    if config_class.sub_configs and not hasattr(config_class, "sub_configs_defaults"):
        pytest.skip(f"this Transformers does not say of what the config of {model_type} is made")
    for name, part in getattr(config_class, "sub_configs_defaults", {}).items():
        if part.model_type in CONFIG_MAPPING:
            fields[name] = {**part.init_kwargs, **fields_of(part.model_type), "model_type": part.model_type}
    return fields | OF_ITS_OWN.get(model_type, {})


def class_of(folder: str) -> type[PreTrainedModel]:
    """The class of a conversion."""
    (architecture,) = AutoConfig.from_pretrained(folder).architectures
    return getattr(hf_hyperconn, architecture)


def inputs_of(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """The inputs of a model: two rows of 24 tokens, images, sounds."""
    tokens = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(0)).tolist()
    kind = kind_that_runs(model, tokens)
    inputs = next(islice(kinds_of_inputs(model, tokens), kind, None))
    return {name: value for name, value in inputs.items() if name != "attention_mask"}


def loss_of(model: PreTrainedModel, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a language model; of another model its last hidden states along a fixed direction."""
    torch.manual_seed(0)  # some models draw what they mask
    if getattr(model, "module", model).can_generate():  # DDP's wrapper asks nothing of its module
        return model(**inputs, labels=inputs.get("decoder_input_ids", inputs.get("input_ids"))).loss
    states = model(**inputs)[0]
    return (states * torch.randn(states.shape[1:], generator=torch.Generator().manual_seed(0))).mean()
