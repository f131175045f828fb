"""Measure what a training step of the models that docs/results.md draws keeps for its backward.

    python -m benchmarks.depth.memory

Each is measured in processes of its own. Writes benchmarks/results/pretraining/deep/memory.json: medians in MiB.
"""

import argparse
import json
import os
import subprocess
import sys
from functools import partial
from statistics import median

import torch

from benchmarks.pretraining.runs import Run
from benchmarks.pretraining.train import build, compile_layers, loss_on
from benchmarks.timing import EACH_ITS_MAPPING, device, kept_mib, write

from .studies import DEEP, DRAWN

PROCESSES = 3


def kept_by(model: str) -> float:
    """MiB kept by a new model, compiled as in the runs."""
    made = build(Run(study="scratch", model=model, seed=0, learning_rate=1e-4, steps=1, warm_up=0), DEEP).to(device())
    compile_layers(made)
    ids = torch.randint(DEEP.vocabulary, (DEEP.batch, DEEP.length), device=device())
    return kept_mib(partial(loss_on, made, ids))


def in_a_process(model: str) -> float:
    """The same, where no other model's memory can be taken again."""
    command = [sys.executable, "-m", __spec__.name, "--model", model]
    done = subprocess.run(command, capture_output=True, check=True, env={**os.environ, **EACH_ITS_MAPPING})
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    torch.set_num_threads(1)
    if asked := parser.parse_args().model:
        print(json.dumps(kept_by(asked)))
        return
    taken = {model: round(median(in_a_process(model) for _ in range(PROCESSES)), 1) for model in DRAWN}
    print(taken, flush=True)
    write(f"pretraining/{DEEP.name}/memory.json", {"Llama": taken})


if __name__ == "__main__":
    main()
