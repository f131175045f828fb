"""Time whole models with hyper-connections against their plain base: training step, prefill and decode.

    python -m benchmarks.models

Each case has few layers of a known shape and random weights, at two depths. What a layer costs is their difference,
and the whole model's cost is extrapolated from it and marked so. A case and the plain model are called in turn, so
that what else the machine does falls on both. On a CPU each case runs in a process of its own, whose memory no other
has used. Writes benchmarks/results/models.json (on a GPU models_cuda.json). On a GPU it takes more kinds of
connections, which run their fused kernels where they have some, and larger shapes, and decodes nothing:
benchmarks.decoding does. Rows that are not asked for keep what was measured there on this device with these versions.
"""

import argparse
import json
from collections.abc import Callable
from functools import partial
from itertools import product
from statistics import median

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, OlmoeConfig, OlmoeForCausalLM

from benchmarks.timing import (
    ALLOCATOR,
    EACH_ITS_MAPPING,
    PROCESSES,
    device,
    file_name,
    in_a_process,
    kept_mib,
    measured,
    medians_ms,
    write,
)
from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM, HCOlmoeConfig, HCOlmoeForCausalLM

# shape, its layers in full, tokens of a step; the vocabulary is left small, for it is no part of a layer
SHAPES = {
    "Llama-3.2-1B": (
        {"hidden_size": 2048, "intermediate_size": 8192, "num_attention_heads": 32, "num_key_value_heads": 8},
        16,
    ),
    "Llama-3.1-8B": (
        {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8},
        32,
    ),
    "OLMoE-1B-7B": (
        {
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        16,
    ),
}
VOCABULARY, STREAMS, DECODED = 1024, 4, 16
TOKENS = {"cpu": (256,), "cuda": (2048, 4096, 16384)}[device()]
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}[device()]
DEPTHS = (2, 4)
MEASURES = {"cpu": ("step", "memory", "prefill", "decode"), "cuda": ("step", "memory", "prefill")}[device()]
HC = {"hc_mult": STREAMS}
ON_A_CPU = {
    "plain": {},
    "plain, compiled": {"compiled": True},
    "HC by autograd": {"fields": HC, "by_autograd": True},
    "HC": {"fields": HC},
    "HC, compiled": {"fields": HC, "compiled": True},
}
KINDS = {
    "plain": None,
    "DHC×4": HC,
    "SHC×4": {**HC, "connection": "shc"},
    "mHC×4": {**HC, "connection": "mhc"},
    "attention residuals, blocks of 8": {"connection": "attnres", "hc_mult": 1, "hc_block": 8},
}
ON_A_GPU = {name: {"fields": fields} for name, fields in KINDS.items()} | {
    f"{name}, compiled": {"fields": fields, "compiled": True} for name, fields in KINDS.items()
}
CASES = ON_A_CPU if device() == "cpu" else ON_A_GPU


def make(shape: str, layers: int, fields: dict | None, by_autograd: bool):
    """Return a model of a few layers with random weights. fields: of its connections; None for the plain one."""
    sizes = {**SHAPES[shape][0], "num_hidden_layers": layers, "vocab_size": VOCABULARY, "use_cache": False}
    mixture = "num_experts" in sizes
    torch.manual_seed(0)
    with torch.device(device()):
        if fields is None:
            model = OlmoeForCausalLM(OlmoeConfig(**sizes)) if mixture else LlamaForCausalLM(LlamaConfig(**sizes))
        else:
            config = (HCOlmoeConfig if mixture else HCLlamaConfig)(**sizes, **fields)
            model = (HCOlmoeForCausalLM if mixture else HCLlamaForCausalLM)(config)
    if by_autograd:
        for layer in model.model.layers:
            layer.attn_hc.coefficient_parameters = layer.mlp_hc.coefficient_parameters = lambda dtype: None
    return model.to(DTYPE)


def compare(what: str, shape: str, tokens: int, options: dict, reference: dict) -> dict[str, list[float]]:
    """Milliseconds of a training step, a prefill or a decoded token at each of `DEPTHS`, called in turn."""
    calls = [call(what, shape, layers, tokens, **case) for case in (reference, options) for layers in DEPTHS]
    times = medians_ms(calls, repeats=9, warm_up=2)
    if what == "decode":
        times = [time / DECODED for time in times]
    return {"reference": times[: len(DEPTHS)], "measured": times[len(DEPTHS) :]}


def call(
    what: str,
    shape: str,
    layers: int,
    tokens: int,
    fields: dict | None = None,
    compiled: bool = False,
    by_autograd: bool = False,
) -> Callable:
    """What is timed, for a model of a few layers: a training step, a prefill, or decoding after it."""
    model = make(shape, layers, fields, by_autograd)
    ids = torch.randint(0, VOCABULARY, (1, tokens), device=device())
    if compiled:
        model.compile()

    def step(backward: bool = True) -> torch.Tensor:
        loss = model(ids, labels=ids).loss
        if backward:
            loss.backward()
            model.zero_grad(set_to_none=True)
        return loss

    if what == "step":
        return step
    model.eval()

    @torch.no_grad()
    def prefill() -> None:
        model(ids, logits_to_keep=1)

    @torch.no_grad()
    def decode() -> None:
        cache = DynamicCache(config=model.config)
        for position in range(DECODED):
            model(ids[:, position : position + 1], past_key_values=cache, use_cache=True)

    return prefill if what == "prefill" else decode


def measure(what: str, case: dict) -> float | dict:
    """Return the MiB that a case's forward keeps for its backward, or its times."""
    if what == "memory":
        return kept_mib(partial(call("step", **case), backward=False))
    return compare(what, **case)


def measure_alone(what: str, case: dict) -> float | dict:
    """Measure a case where it sees no other's memory or compiled code: on a CPU, in a process of its own."""
    if device() == "cuda":
        torch.compiler.reset()
        torch.cuda.empty_cache()
        return measure(what, case)
    allocator = EACH_ITS_MAPPING if what == "memory" else ALLOCATOR
    return in_a_process("benchmarks.models", "--case", what, json.dumps(case), environment=allocator)


def row_of(shape: str, tokens: int, name: str, what: str) -> dict:
    """Return one figure of one case: at each depth, extrapolated, and over the plain model's."""
    options = CASES[name]
    # against the plain model in the same mode
    reference = {} if name.startswith("plain") else {"compiled": bool(options.get("compiled"))}
    case = {"shape": shape, "tokens": tokens}
    if what == "memory":
        times = PROCESSES if device() == "cpu" else 1  # on a GPU what is held is known
        taken = {
            kind: [
                median(measure_alone(what, {**case, "layers": layers, **settings}) for _ in range(times))
                for layers in DEPTHS
            ]
            for kind, settings in (("reference", reference), ("measured", options))
        }
    else:
        taken = measure_alone(what, {**case, "options": options, "reference": reference})
    layers, (few, many) = SHAPES[shape][1], DEPTHS
    whole = {
        kind: values[0] + (layers - few) * (values[1] - values[0]) / (many - few) for kind, values in taken.items()
    }
    return {**taken, "extrapolated": whole, "ratio": whole["measured"] / whole["reference"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    shapes = list(SHAPES)[:1] if device() == "cpu" else list(SHAPES)
    parser.add_argument("--what", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--shapes", nargs="+", choices=shapes, default=shapes)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--tokens", nargs="+", type=int, default=TOKENS)
    parser.add_argument("--case", nargs=2, metavar=("WHAT", "CASE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.case:
        what, case = arguments.case
        print(json.dumps(measure(what, json.loads(case))))
        return
    if device() == "cpu":
        print(f"no GPU here: not measured are {', '.join(ON_A_GPU)}, and the shapes {', '.join(list(SHAPES)[1:])}.")
    file = file_name("models")
    rows = {(row["shape"], row["tokens"], row["case"]): row for row in measured(file)}
    for shape, tokens, name in product(arguments.shapes, arguments.tokens, arguments.cases):
        row = {"shape": shape, "tokens": tokens, "case": name}
        for what in arguments.what:
            if name == "plain" and what != "memory":
                continue
            row[what] = row_of(shape, tokens, name, what)
        rows[shape, tokens, name] = {**rows.get((shape, tokens, name), {}), **row}
        shown = "  ".join(f"{what} {row[what]['ratio']:6.3f}x" for what in arguments.what if what in row)
        print(f"{shape} {tokens:>6} {name:<42} {shown}", flush=True)
        shared = {"dtype": str(DTYPE)[6:], "depths": DEPTHS, "streams": STREAMS}
        write(file, {**shared, "rows": list(rows.values())})


if __name__ == "__main__":
    main()
