"""The cards in `model_cards/`, rendered from the public configs of two models and files that hold no weights.

    HF_HUB_OFFLINE=1 python -m tests.card_examples

writes them anew.
"""

import json
import tempfile
from math import prod
from pathlib import Path

from huggingface_hub import constants

from hf_hyperconn.conversion.card import write_card
from hf_hyperconn.conversion.convert import convert_checkpoint

CARDS = Path(__file__).resolve().parents[1] / "model_cards"
COMMIT = "0" * 40  # stands for the base's
VERSIONS = {"hf_hyperconn": "0.1.0", "safetensors": "0.8.0", "torch": "2.13.0", "transformers": "5.23.0"}

# without the fields that hold the defaults of their model type
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "head_dim": 64,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
# without extra_gated_prompt, which holds the text of the license
LLAMA_CARD = """---
language: [en, de, fr, it, pt, hi, es, th]
library_name: transformers
pipeline_tag: text-generation
tags: [facebook, meta, pytorch, llama, llama-3]
license: llama3.2
extra_gated_fields:
  First Name: text
  Last Name: text
  Date of birth: date_picker
  Country: country
  Affiliation: text
  geo: ip_location
extra_gated_button_content: Submit
---

## Model Information
"""
OLMOE = {
    "architectures": ["OlmoeForCausalLM"],
    "eos_token_id": 50279,
    "hidden_size": 2048,
    "intermediate_size": 1024,
    "max_position_embeddings": 4096,
    "model_type": "olmoe",
    "num_attention_heads": 16,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 16,
    "num_key_value_heads": 16,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 50304,
}
OLMOE_CARD = """---
license: apache-2.0
language: [en]
tags: [moe, olmo, olmoe]
co2_eq_emissions: 1
datasets: [allenai/OLMoE-mix-0924]
library_name: transformers
---

# Model Summary
"""
TOKENIZER = ("tokenizer.json", "tokenizer_config.json")

# by card: the base's id, config and card, and its other files
EXAMPLES = {
    "Llama-3.2-1B-HCx4": ("meta-llama/Llama-3.2-1B", LLAMA, LLAMA_CARD, ("LICENSE.txt", "USE_POLICY.md", *TOKENIZER)),
    "OLMoE-1B-7B-HCx4": ("allenai/OLMoE-1B-7B-0924", OLMOE, OLMOE_CARD, TOKENIZER),
}


def shapes_of(config: dict) -> dict[str, list[int]]:
    """Return names and shapes of the weights on disk of a Llama or OLMoE config."""
    d, f, v = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    key_value = d // config["num_attention_heads"] * config["num_key_value_heads"]
    mlp = {"gate_proj": [f, d], "up_proj": [f, d], "down_proj": [d, f]}
    layer = {"input_layernorm": [d], "post_attention_layernorm": [d]}
    layer |= {f"self_attn.{name}_proj": [d if name in "qo" else key_value, d] for name in "qkvo"}
    if "num_experts" in config:
        layer |= {"self_attn.q_norm": [d], "self_attn.k_norm": [key_value], "mlp.gate": [config["num_experts"], d]}
        layer |= {f"mlp.experts.{i}.{name}": mlp[name] for i in range(config["num_experts"]) for name in mlp}
    else:
        layer |= {f"mlp.{name}": shape for name, shape in mlp.items()}
    shapes = {"model.embed_tokens": [v, d], "model.norm": [d]}
    if not config["tie_word_embeddings"]:
        shapes["lm_head"] = [v, d]
    shapes |= {f"model.layers.{i}.{name}": layer[name] for i in range(config["num_hidden_layers"]) for name in layer}
    return {f"{name}.weight": shape for name, shape in shapes.items()}


def write_weights(path: Path, shapes: dict[str, list[int]]) -> None:
    """Write a safetensors file of bfloat16 zeros, which take no space on disk."""
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, shape in shapes.items():
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [end, end := end + 2 * prod(shape)]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def cache(folder: Path, base: str, config: dict, card: str, files: tuple[str, ...]) -> Path:
    """Put a model into a cache of the Hub, and return where."""
    repo = folder / f"models--{base.replace('/', '--')}"
    snapshot = repo / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text(COMMIT)
    (snapshot / "config.json").write_text(json.dumps(config))
    (snapshot / "README.md").write_text(card)
    for name in files:
        (snapshot / name).write_text("{}")
    return snapshot


def render(name: str, place: Path) -> str:
    """Return the card of an example, converted in the folder `place` from a cache that is made there."""
    base, config, card, files = EXAMPLES[name]
    snapshot = cache(place / "hub", base, config, card, files)
    write_weights(snapshot / "model.safetensors", shapes_of(config))
    previous, constants.HF_HUB_CACHE = constants.HF_HUB_CACHE, str(place / "hub")
    try:
        out = convert_checkpoint(base, place / name, link="hard", verify="structure").path
    finally:
        constants.HF_HUB_CACHE = previous
    record = json.loads((out / "hyperconn_conversion.json").read_text())
    (out / "hyperconn_conversion.json").write_text(json.dumps({**record, "versions": VERSIONS}))
    (out / "README.md").unlink()
    (path, *_) = write_card(out).files
    return path.read_text(encoding="utf-8")


def main() -> None:
    for name in EXAMPLES:
        with tempfile.TemporaryDirectory() as place:
            (CARDS / f"{name}.md").write_text(render(name, Path(place)), encoding="utf-8")


if __name__ == "__main__":
    if not constants.HF_HUB_OFFLINE:
        raise SystemExit("the bases come from a cache made here; run it with HF_HUB_OFFLINE=1")
    main()
