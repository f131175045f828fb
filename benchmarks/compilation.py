"""Time how long models take to compile, whole and layer by layer, against their plain base.

    python -m benchmarks.compilation

A training step of six layers, the first of its process, with nothing in Inductor's cache. Layer by layer is what
accelerate's regional compilation does. Each case follows a plain model's, in a process of its own. Writes
benchmarks/results/compilation.json (on a GPU compilation_cuda.json): seconds, and ratios to the plain model's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time

import torch

from benchmarks.llamas import build
from benchmarks.timing import device, write

SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 512,
    "use_cache": False,
}
TOKENS = (2, 128)
PLAIN = "plain"
CASES: dict[str, dict | None] = {
    PLAIN: None,
    "DHC×4": {"connection": "dhc"},
    "DHC×8": {"connection": "dhc", "hc_mult": 8},
    "mHC×4": {"connection": "mhc"},
}
WAYS = ("whole", "layers")


def first_step(case: str, way: str) -> float:
    """Seconds of a model's first step over those of its third."""
    model = build(SHAPE, CASES[case])
    if way == "whole":
        model.compile()
    else:
        for layer in model.model.layers:
            layer.compile()
    ids = torch.randint(SHAPE["vocab_size"], TOKENS, device=device())
    times = []
    for _ in range(3):
        started = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        if device() == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return times[0] - times[2]


def in_a_process(case: str, way: str) -> float:
    """The same, in a process and with a cache of its own."""
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        command = [sys.executable, "-m", __spec__.name, "--case", case, way]
        return json.loads(subprocess.run(command, env=environment, check=True, capture_output=True).stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", nargs=2, metavar=("CASE", "WAY"), help=argparse.SUPPRESS)
    asked = parser.parse_args().case
    if asked:
        print(json.dumps(first_step(*asked)))
        return
    rows = []
    for case in (name for name in CASES if name != PLAIN):
        row = {"case": case}
        for way in WAYS:
            plain, taken = in_a_process(PLAIN, way), in_a_process(case, way)
            row[way] = {"seconds": round(taken, 1), "ratio": round(taken / plain, 2)}
        rows.append(row)
        print(row, flush=True)
    write("compilation.json" if device() == "cpu" else "compilation_cuda.json", {"shape": SHAPE, "rows": rows})


if __name__ == "__main__":
    main()
