"""Time a training step of the pair, in turn, alone on the machine.

    python -m benchmarks.pretraining.times [--threads 1]

Writes benchmarks/results/pretraining/<scale>/times.json: medians in milliseconds.
"""

import argparse
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.timing import device, medians_ms, write

from .runs import FAMILIES, PAIR, Run, is_compiled, scale
from .train import TRAINED_WITH, build, loss_on, optimizer_of, training_step

REPEATS = 30


def step_of(model: str, family: str) -> Callable[[], float]:
    """A training step of a new model."""
    size = scale()
    run = Run(study="scratch", model=model, family=family, seed=0, learning_rate=1e-4, steps=1, warm_up=0)
    made = build(run).to(device())
    loss_of = torch.compile(loss_on) if is_compiled(run, size) else loss_on
    ids = torch.randint(256, (size.batch, size.length), device=device())
    return partial(training_step, made, loss_of, optimizer_of(made, run), ids, **TRAINED_WITH[family])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    result = {}
    for family in FAMILIES:
        taken = medians_ms([step_of(model, family) for model in PAIR], REPEATS)
        result[family] = dict(zip(PAIR, (round(each, 2) for each in taken), strict=True))
        print(family, result[family], flush=True)
    write(f"pretraining/{scale().name}/times.json", result)


if __name__ == "__main__":
    main()
