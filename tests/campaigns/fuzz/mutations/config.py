"""Mutations of config.json."""

import random

from tests.families import FAMILIES

from .values import Target, edited, spoiled, strange

SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
ABSURD = (10**5, 10**6, 10**8, 2**31, 2**63, 10**18, 20_000)
CODE = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil/repo--evil.Model"}
FIELDS = (
    *SIZES,
    *("num_key_value_heads", "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "hidden_act"),
    *("rope_scaling", "rope_parameters", "tie_word_embeddings", "dtype", "torch_dtype", "model_type", "architectures"),
    *("auto_map", "quantization_config", "layer_types", "sliding_window", "pad_token_id", "eos_token_id"),
    *("num_experts", "num_experts_per_tok", "num_labels", "id2label", "initializer_range", "attention_dropout"),
    *("_name_or_path", "transformers_version", "use_cache", "is_encoder_decoder", "torchscript", "pruned_heads"),
    *("hc_mult", "connection", "hc_tanh", "hc_readout", "hc_eps", "hc_sinkhorn_iters", "norm", "hc_base_model"),
    *("hc_base_commit", "norm_alpha_attention"),
)


def set_field(target: Target, pick: random.Random) -> str:
    with edited(target.folder / "config.json") as config:
        name = pick.choice([*config, *FIELDS])
        config[name] = strange(pick)
    return f"{name} = {config[name]!r:.60}"


def remove_field(target: Target, pick: random.Random) -> str:
    with edited(target.folder / "config.json") as config:
        name = pick.choice(list(config))
        del config[name]
    return f"{name} removed"


def another_size(target: Target, pick: random.Random) -> str:
    """As a config that was copied from a brother of the model."""
    with edited(target.folder / "config.json") as config:
        name = pick.choice(SIZES)
        config[name] = pick.choice([config[name] + 1, config[name] - 1, 2 * config[name], config[name] // 2])
    return f"{name} = {config[name]}"


def absurd_size(target: Target, pick: random.Random) -> str:
    with edited(target.folder / "config.json") as config:
        name = pick.choice([*SIZES, "hc_mult"] if "hc_mult" in config else SIZES)
        config[name] = pick.choice(ABSURD)
    return f"{name} = {config[name]}"


def another_type(target: Target, pick: random.Random) -> str:
    with edited(target.folder / "config.json") as config:
        name = pick.choice([*FAMILIES, "gpt2", "bert", "t5", "hc_llama", "hc_olmoe", "mamba", "unheard-of"])
        config["model_type"] = name
        if name in FAMILIES and pick.random() < 0.7:
            config["architectures"] = [f"{FAMILIES[name].name}ForCausalLM"]
    return f"model_type = {name}"


def other_computation(target: Target, pick: random.Random) -> str:
    """A field that no tensor's shape tells."""
    with edited(target.folder / "config.json") as config:
        name, value = pick.choice(
            [("rope_theta", 500.0), ("rms_norm_eps", 0.5), ("norm_epsilon", 0.5), ("num_attention_heads", 2)]
            + [("hc_readout", "sum"), ("hidden_act", "relu"), ("tie_word_embeddings", True), ("hc_tanh", False)]
            + [("rope_parameters", {"rope_type": "default", "rope_theta": 77.0}), ("clip_qkv", 0.01)]
        )
        config[name] = value
    return f"{name} = {value!r}"


def own_code(target: Target, pick: random.Random) -> str:
    with edited(target.folder / "config.json") as config:
        config["auto_map"] = pick.choice([CODE, {**config.get("auto_map", {}), **CODE}, "evil.Model", [], {"a": None}])
    return f"auto_map = {config['auto_map']!r:.60}"


ALL = (
    *(set_field, set_field, set_field, remove_field, another_size, absurd_size, another_type, other_computation),
    own_code,
    *spoiled("config.json"),
)
