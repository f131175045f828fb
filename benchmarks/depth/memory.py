"""Measure what a training step of the models that docs/results.md draws keeps for its backward.

    python -m benchmarks.depth.memory

Each is measured in processes of its own. Writes benchmarks/results/pretraining/deep/memory.json: medians in MiB.
"""

import argparse
import json
from functools import partial
from statistics import median

import torch

from benchmarks.pretraining.times import prepared
from benchmarks.timing import EACH_ITS_MAPPING, PROCESSES, in_a_process, kept_mib, write

from .scales import DEEP
from .studies import TIMED


def kept_by(model: str) -> float:
    """MiB kept by a new model, compiled as in the runs."""
    _, made, loss_of, ids = prepared(model, "Llama", DEEP)
    return kept_mib(partial(loss_of, made, ids))


def elsewhere(model: str) -> float:
    """Return the same, where no other model's memory can be taken again."""
    return in_a_process("benchmarks.depth.memory", "--model", model, environment=EACH_ITS_MAPPING)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    torch.set_num_threads(1)
    if asked := parser.parse_args().model:
        print(json.dumps(kept_by(asked)))
        return
    taken = {model: round(median(elsewhere(model) for _ in range(PROCESSES)), 1) for model in TIMED}
    print(taken, flush=True)
    write(f"pretraining/{DEEP.name}/memory.json", {"Llama": taken})


if __name__ == "__main__":
    main()
