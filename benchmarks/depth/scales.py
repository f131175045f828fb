"""The shapes and lengths of the deep study: on a CPU, wider for a GPU, and small for a saturated base."""

from dataclasses import replace

from benchmarks.pretraining.runs import Scale

LLAMA = {
    "hidden_size": 96,
    "intermediate_size": 256,
    "num_hidden_layers": 24,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ALL_OF_A_HEAD = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}  # is turned, as Llama's
DEEP = Scale(
    "deep",
    shapes={
        "Llama": LLAMA,
        "Qwen3": {**LLAMA, "head_dim": 24},
        "GLM-4": {**LLAMA, "head_dim": 24, "attention_bias": False, "rope_parameters": ALL_OF_A_HEAD},
        "OLMoE": {
            "hidden_size": 96,
            "intermediate_size": 64,
            "num_hidden_layers": 24,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "num_experts": 8,
            "num_experts_per_tok": 2,
        },
    },
    length=256,
    batch=4,
    steps={"scratch": 1000, "base": 3000, "continued": 300, "trunk": 2000},
    tried={"scratch": (4e-3, 2e-3, 8e-3), "continued": (1e-4, 3e-4, 1e-3)},
    taken={"continued": 3e-4},
    base_learning_rate=2e-3,
    slower={"Llama": 1.25},
    held_out=(64, 512),
    compiled=("Llama", "Qwen3", "GLM-4"),
    vocabulary=2048,
    keeps_base=True,
    taken_at=(200, 500, 1000, 1500),
    by_layer=True,
)
# as deep, for a GPU: 15 times the parameters, six times the tokens, which are half of the books
WIDE = replace(
    DEEP,
    name="wide",
    shapes={
        "Llama": {
            "hidden_size": 384,
            "intermediate_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 6,
            "num_key_value_heads": 3,
        }
    },
    batch=32,
    steps={"scratch": 800},
    tried={"scratch": (1e-3, 3e-3)},
    taken={},
    keeps_base=False,
)
# as deep, for a base that has seen 61 tokens of each parameter
SMALL = replace(
    DEEP,
    name="small",
    shapes={
        "Llama": {
            "hidden_size": 48,
            "intermediate_size": 128,
            "num_hidden_layers": 12,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
        }
    },
    batch=8,
    steps={"base": 12000, "continued": 3000},
    base_learning_rate=4e-3,
)
