"""The families whose every property is tested, with the structural switches of each on."""

from hf_hyperconn.families.family import find_family

WINDOW = {"sliding_window": 8}
MIXED_WINDOWS = {"layer_types": ["full_attention", "sliding_attention", "full_attention"], **WINDOW}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}

# what a family adds to or changes in `SHARED`
FIELDS = {
    "llama": {"head_dim": 16, "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
    "mistral": {"head_dim": 16, "tie_word_embeddings": True, **WINDOW},
    "qwen2": {"use_sliding_window": True, "tie_word_embeddings": True, **MIXED_WINDOWS},
    "qwen3": {"head_dim": 16, "attention_bias": True, "use_sliding_window": True, **MIXED_WINDOWS},
    "smollm3": {"no_rope_layers": [1, 0, 1], "attention_bias": True, "use_sliding_window": True, **MIXED_WINDOWS},
    "seed_oss": {"head_dim": 16, "attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
    "phi3": {
        "resid_pdrop": 0.1,
        "embd_pdrop": 0.1,
        "attention_dropout": 0.1,
        "original_max_position_embeddings": 16,
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.2, 1.3],
            "long_factor": [1.0, 2.0, 3.0, 4.0],
        },
        **WINDOW,
    },
    "starcoder2": {"use_bias": True, "residual_dropout": 0.1, "embedding_dropout": 0.1, **WINDOW},
    "gemma": {"head_dim": 16, "attention_bias": True},
    "gemma2": {"head_dim": 16, "attention_bias": True, "query_pre_attn_scalar": 16, **MIXED_WINDOWS},
    "olmo": {"clip_qkv": 2.0, "attention_bias": True, "tie_word_embeddings": True},
    "olmo2": {"attention_bias": True, "tie_word_embeddings": True},
    "olmo3": {"attention_bias": True, **MIXED_WINDOWS},
    "granite": {
        "residual_multiplier": 0.22,
        "embedding_multiplier": 12.0,
        "attention_multiplier": 0.3,
        "logits_scaling": 8.0,
        "attention_bias": True,
        "mlp_bias": True,
        "tie_word_embeddings": True,
    },
    "olmoe": {"num_experts": 8, "num_experts_per_tok": 2, "clip_qkv": 2.0, "attention_bias": True},
    "mixtral": {"head_dim": 16, "num_local_experts": 4, "tie_word_embeddings": True, **WINDOW},
    "qwen2_moe": {
        "num_experts": 4,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [0],
        "use_sliding_window": True,
        **EXPERTS,
        **MIXED_WINDOWS,
    },
    "qwen3_moe": {
        "head_dim": 16,
        "num_experts": 4,
        "mlp_only_layers": [0],
        "attention_bias": True,
        "use_sliding_window": True,
        **EXPERTS,
        **WINDOW,
    },
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, **MIXED_WINDOWS},
    "deepseek_v3": {
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "attention_bias": True,
        **EXPERTS,
    },
}

FAMILIES = {model_type: find_family(model_type) for model_type in FIELDS}
