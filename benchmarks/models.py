"""Time whole models with hyper-connections against their plain base: training step, prefill and decode.

    python -m benchmarks.models

Each case runs in a process of its own, with few layers of a known shape and random weights, at two depths. What a
layer costs is their difference, and the whole model's cost is extrapolated from it and marked so. Writes
benchmarks/results/models.json (on a GPU models_cuda.json). On a GPU it also takes the fused kernels and larger shapes.
"""

import argparse
import gc
import json
import os
import subprocess
import sys

import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM, OlmoeConfig, OlmoeForCausalLM

from benchmarks.timing import ALLOCATOR, device, median_ms, write
from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM, HCOlmoeConfig, HCOlmoeForCausalLM, set_hc_implementation

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
VOCABULARY, STREAMS = 1024, 4
TOKENS = {"cpu": 256, "cuda": 4096}[device()]
DTYPE = {"cpu": torch.float32, "cuda": torch.bfloat16}[device()]
DEPTHS = (2, 4)
MEASURES = ("step", "memory", "prefill", "decode")
CASES = {
    "plain": {},
    "plain, compiled": {"compiled": True},
    "HC by autograd": {"streams": STREAMS, "by_autograd": True},
    "HC": {"streams": STREAMS},
    "HC, compiled": {"streams": STREAMS, "compiled": True},
    "HC, streams recomputed": {"streams": STREAMS, "recomputed": True},
}
ON_A_GPU = {
    "HC, fused": {"streams": STREAMS, "implementation": "triton"},
    "HC, fused and compiled": {"streams": STREAMS, "implementation": "triton", "compiled": True},
    "HC, fused, streams recomputed": {"streams": STREAMS, "implementation": "triton", "recomputed": True},
}


def make(shape: str, layers: int, streams: int | None, by_autograd: bool, recomputed: bool):
    """A model of a few layers with random weights; `streams` is None for the plain one."""
    sizes = {**SHAPES[shape][0], "num_hidden_layers": layers, "vocab_size": VOCABULARY, "use_cache": False}
    mixture = "num_experts" in sizes
    torch.manual_seed(0)
    if streams is None:
        model = OlmoeForCausalLM(OlmoeConfig(**sizes)) if mixture else LlamaForCausalLM(LlamaConfig(**sizes))
    else:
        config = (HCOlmoeConfig if mixture else HCLlamaConfig)(**sizes, hc_mult=streams)
        model = (HCOlmoeForCausalLM if mixture else HCLlamaForCausalLM)(config)
        if by_autograd:
            for layer in model.model.layers:
                layer.attn_hc.reader = layer.mlp_hc.reader = lambda dtype: None
        if recomputed:
            model.set_stream_recomputation(4)
    return model.to(device(), DTYPE)


def measure(
    shape: str,
    layers: int,
    what: str,
    streams: int | None = None,
    compiled: bool = False,
    implementation: str = "torch",
    by_autograd: bool = False,
    recomputed: bool = False,
) -> float:
    """Milliseconds of a training step, a prefill or a decoded token; or MiB that a forward keeps for its backward."""
    set_hc_implementation(implementation)
    model = make(shape, layers, streams, by_autograd, recomputed)
    tokens = torch.randint(0, VOCABULARY, (1, TOKENS), device=device())
    if compiled:
        model.compile()

    def step() -> None:
        model.zero_grad(set_to_none=True)
        model(tokens, labels=tokens).loss.backward()

    if what == "memory":
        step()
        model.zero_grad(set_to_none=True)
        gc.collect()
        before = held()
        loss = model(tokens, labels=tokens).loss
        kept = held() - before
        loss.backward()
        return kept / 2**20
    if what == "step":
        return median_ms(step, repeats=5, warm_up=2)
    model.eval()
    with torch.no_grad():
        if what == "prefill":
            return median_ms(lambda: model(tokens, logits_to_keep=1), repeats=7, warm_up=2)

        def decode(count: int) -> None:
            model.generate(
                tokens[:, :8],
                min_new_tokens=count,
                max_new_tokens=count,
                do_sample=False,
                pad_token_id=0,
                use_cache=True,
            )

        return (median_ms(lambda: decode(24), 5, 2) - median_ms(lambda: decode(8), 5, 2)) / 16


def held() -> int:
    """Bytes of memory in use."""
    return torch.cuda.memory_allocated() if device() == "cuda" else psutil.Process().memory_info().rss


def in_a_process(*arguments) -> float:
    """`measure` elsewhere, so that no case sees another's memory or compiled code."""
    # every buffer its own mapping where memory is read off the process, none where time is taken
    allocator = dict.fromkeys(ALLOCATOR, "65536") if arguments[2] == "memory" else ALLOCATOR
    command = [sys.executable, "-m", "benchmarks.models", "--case", json.dumps(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **allocator})
    if done.returncode:
        raise RuntimeError(f"{arguments} failed:\n{done.stderr[-2000:]}")
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--what", nargs="+", choices=MEASURES, default=MEASURES)
    parser.add_argument("--case", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.case:
        shape, layers, what, options = json.loads(arguments.case)
        print(measure(shape, layers, what, **options))
        return
    shapes, cases = list(SHAPES), {**CASES, **ON_A_GPU}
    if device() == "cpu":
        shapes, cases = shapes[:1], CASES
        print(f"no GPU here: not measured are {', '.join(ON_A_GPU)}, and the shapes {', '.join(list(SHAPES)[1:])}.")
    rows = []
    for shape in shapes:
        for name, options in cases.items():
            row = {"shape": shape, "case": name}
            for what in arguments.what:
                if what in ("prefill", "decode") and options.get("recomputed"):
                    continue
                few, many = (in_a_process(shape, layers, what, options) for layers in DEPTHS)
                layer = (many - few) / (DEPTHS[1] - DEPTHS[0])
                whole = few + (SHAPES[shape][1] - DEPTHS[0]) * layer
                row[what] = {"measured": [few, many], "a_layer": layer, "extrapolated": whole}
            rows.append(row)
            shown = "  ".join(f"{what} {row[what]['a_layer']:9.2f}" for what in row if what not in ("shape", "case"))
            print(f"{shape} {name:<32} a layer: {shown}", flush=True)
    write(
        "models.json" if device() == "cpu" else "models_cuda.json",
        {"tokens": TOKENS, "dtype": str(DTYPE)[6:], "depths": DEPTHS, "streams": STREAMS, "rows": rows},
    )


if __name__ == "__main__":
    main()
