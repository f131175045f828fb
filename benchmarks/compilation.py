"""Time how long models take to compile, whole and layer by layer, against their plain base.

    python -m benchmarks.compilation [--cases "DHC×4" ...] [--ways layers]

A training step of six layers, the first of its process, with nothing in Inductor's cache. Layer by layer is what
accelerate's regional compilation does. Each case follows a plain model's, in a process of its own. Where kernels are
operators, as in graphs for a GPU, Triton's interpreter runs them on a CPU, on fewer tokens. Writes
benchmarks/results/compilation.json (on a GPU compilation_cuda.json): seconds of processor time, compilers' included,
ratios to the plain model's, and graphs. Cases and ways that are not asked for keep what was measured there on this
device with these versions.
"""

import argparse
import json
import os
import resource
import tempfile

import torch
from torch._dynamo.utils import counters

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
ONE_PROCESS = {"TORCHINDUCTOR_COMPILE_THREADS": "1"}  # of Inductor, so that all compilers are its children


def processor_time() -> float:
    """Return the seconds of processor time of this process, and of its children that have ended."""
    return sum(sum(resource.getrusage(who)[:2]) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))


def first_step(model_name: str, way: str) -> tuple[float, int]:
    """Return the seconds of a model's first step over those of its third, and the number of graphs."""
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
        started = processor_time()
        model(input_ids=ids, labels=ids).loss.backward()
        if device() == "cuda":
            torch.cuda.synchronize()
        times.append(processor_time() - started)
    return times[0] - times[2], counters["stats"]["unique_graphs"]


def first_step_alone(model_name: str, way: str, settings: dict[str, str]) -> tuple[float, int]:
    """Take the first step in a process and with a cache of its own. settings: more of its environment."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {"TORCHINDUCTOR_CACHE_DIR": cache, **ONE_PROCESS, **settings}
        return in_a_process("benchmarks.compilation", "--model", model_name, way, environment=environment)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    offered = [case for case in CASES if case != BY_OPERATORS or device() == "cpu"]
    parser.add_argument("--cases", nargs="+", choices=offered, help="all, by default")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS, help="both, by default")
    parser.add_argument("--model", nargs=2, metavar=("MODEL", "WAY"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model:
        print(json.dumps(first_step(*options.model)))
        return
    file = file_name("compilation")
    rows = {row["case"]: row for row in measured(file)}
    for case in options.cases or offered:
        row = rows.setdefault(case, {"case": case})
        settings = INTERPRETED if case == BY_OPERATORS else {}
        for way in options.ways:
            (plain, _), (taken, graphs) = (first_step_alone(name, way, settings) for name in (PLAIN, CASES[case]))
            row[way] = {"seconds": round(taken, 1), "ratio": round(taken / plain, 2), "graphs": graphs}
        print(row, flush=True)
    write(file, {"shape": SHAPE, "rows": [rows[case] for case in CASES if case in rows]})


if __name__ == "__main__":
    main()
