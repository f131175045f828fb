"""Time a training step of the models that docs/results.md draws, in turn, alone on the machine.

    python -m benchmarks.depth.times [--threads 1]

Writes benchmarks/results/pretraining/deep/times.json and small/times.json; on a GPU, where the wide models are timed,
wide/times.json: medians in milliseconds. deep/times_xeon.json is of another machine.
"""

import argparse

import torch

from benchmarks.pretraining.times import time_steps
from benchmarks.timing import device

from .scales import DEEP, SMALL, WIDE
from .studies import TIMED


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    for size in (WIDE,) if device() == "cuda" else (DEEP, SMALL):
        time_steps(size, ("Llama",), TIMED)


if __name__ == "__main__":
    main()
