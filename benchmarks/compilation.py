"""Time how long models take to compile, whole and layer by layer, against their plain base.

    python -m benchmarks.compilation [--cases "DHC×4" ...]

A training step of six layers, the first of its process, with nothing in Inductor's cache. Layer by layer is what
accelerate's regional compilation does. Each case follows a plain model's, in a process of its own. Where kernels are
operators, as in graphs for a GPU, Triton's interpreter runs them on a CPU, on fewer tokens. Writes
benchmarks/results/compilation.json (on a GPU compilation_cuda.json): seconds, and ratios to the plain model's. Cases
that are not asked for keep what was measured there on this device with these versions.
"""

import argparse
import json
import os
import tempfile
import time

import torch

from benchmarks.llamas import PLAIN, build
from benchmarks.timing import device, file_name, in_a_process, measured, write

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "use_cache": False,
}
TOKENS, TOKENS_INTERPRETED = (2, 128), (1, 8)
BY_OPERATORS = "DHC×4, kernels as operators"
INTERPRETED = {"TRITON_INTERPRET": "1", "HF_HYPERCONN_IMPLEMENTATION": "triton"}
CASES = {"DHC×4": "DHC×4", BY_OPERATORS: "DHC×4", "DHC×8": "DHC×8", "mHC×4": "mHC×4"}  # models by case
WAYS = ("whole", "layers")


def first_step(model_name: str, way: str) -> float:
    """Return the seconds of a model's first step over those of its third."""
    model = build(SHAPE, model_name)
    if way == "whole":
        model.compile()
    else:
        for layer in model.model.layers:
            layer.compile()
    tokens = TOKENS_INTERPRETED if os.environ.get("TRITON_INTERPRET") == "1" else TOKENS
    ids = torch.randint(SHAPE["vocab_size"], tokens, device=device())
    times = []
    for _ in range(3):
        started = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        if device() == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return times[0] - times[2]


def first_step_alone(model_name: str, way: str, settings: dict[str, str]) -> float:
    """Take the first step in a process and with a cache of its own. settings: more of its environment."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {"TORCHINDUCTOR_CACHE_DIR": cache, **settings}
        return in_a_process("benchmarks.compilation", "--model", model_name, way, environment=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    offered = [case for case in CASES if case != BY_OPERATORS or device() == "cpu"]
    parser.add_argument("--cases", nargs="+", choices=offered, help="all, by default")
    parser.add_argument("--model", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        print(json.dumps(first_step(*options.model)))
        return
    file = file_name("compilation")
    rows = {row["case"]: row for row in measured(file)} if options.cases else {}
    for case in options.cases or offered:
        rows[case] = {"case": case}
        settings = INTERPRETED if case == BY_OPERATORS else {}
        for way in WAYS:
            plain, taken = (first_step_alone(name, way, settings) for name in (PLAIN, CASES[case]))
            rows[case][way] = {"seconds": round(taken, 1), "ratio": round(taken / plain, 2)}
        print(rows[case], flush=True)
    write(file, {"shape": SHAPE, "rows": [rows[case] for case in CASES if case in rows]})


if __name__ == "__main__":
    main()
