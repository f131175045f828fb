"""Estimates of training large models with connections, for a table of docs/scale.md."""

import json

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, MixtralConfig, PreTrainedConfig

from benchmarks.models import SHAPES
from benchmarks.timing import RESULTS, markdown
from hf_hyperconn.analysis.costs import base_flops
from hf_hyperconn.analysis.estimates import Estimate, estimate
from hf_hyperconn.conversion.terminal import written_bytes
from hf_hyperconn.models.connection_fields import complete


def llama(name: str, **fields: bool) -> LlamaConfig:
    """Return the config of a Llama with its whole vocabulary."""
    sizes, layers = SHAPES[name]
    return LlamaConfig(**sizes, num_hidden_layers=layers, vocab_size=128256, **fields)


LLAMA_8B = llama("Llama-3.1-8B")
MODELS: dict[str, PreTrainedConfig] = {
    "Llama-3.2-1B": llama("Llama-3.2-1B", tie_word_embeddings=True),
    "Llama-3.1-8B": LLAMA_8B,
    "Mixtral-8x7B": MixtralConfig(vocab_size=32000),  # its sizes are the defaults
}
TOKENS, GPUS = 4096, (8, 64)


def estimated(config: PreTrainedConfig, gpus: int = 1, dtype: str = "float32", **fields: str | int) -> Estimate:
    """Estimate the training of a model with the sizes of a config, and connections of these fields."""
    with torch.device("meta"):
        base = AutoModelForCausalLM.from_config(config)
    shapes = {name: parameter.shape for name, parameter in base.named_parameters()}
    written = {**config.to_dict(), "architectures": [type(base).__name__], **complete(fields)}
    counts = {"parameters": base.num_parameters(), "flops": base_flops(written, shapes)}
    return estimate(written, ("weight",), **counts, tokens=TOKENS, gpus=gpus, dtype=dtype)


def table() -> str:
    """Return Markdown: a row for each model and number of streams."""
    rows = []
    for name, config in MODELS.items():
        for n in (2, 4):
            found = estimated(config, hc_mult=n)
            plain = [written_bytes(found.state / gpus) for gpus in GPUS] if n == 2 else [""] * len(GPUS)
            rows.append(
                [
                    f"{name}, DHC×{n}",
                    f"+{100 * found.added_parameters / found.parameters:.2g} %",
                    f"+{100 * found.added_flops / found.flops:.2g} %",
                    *plain,
                    f"+{written_bytes(found.kept)}",
                    f"{written_bytes(found.layer_inputs)}, +{written_bytes(found.added_layer_inputs or 0)}",
                    f"{found.time:.2f}×",
                    _measured(name) if n == 4 else "",
                ]
            )
    head = ["", "parameters", "FLOPs", *(f"state, FSDP over {gpus}" for gpus in GPUS)]
    return markdown([*head, "kept", "with checkpointing", "a step", "measured"], rows)


def _measured(shape: str) -> str:
    """Return the time of a compiled step with 4096 tokens on an H100, relative to the plain model's."""
    rows = json.loads((RESULTS / "models_cuda.json").read_text(encoding="utf-8"))["rows"]
    case = {"shape": shape, "tokens": TOKENS, "case": "DHC×4, compiled"}
    ratios = [row["step"]["ratio"] for row in rows if case.items() <= row.items()]
    return f"{ratios[0]:.2f}×" if ratios else ""
