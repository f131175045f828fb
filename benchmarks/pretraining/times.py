"""Time a training step of the pair, in turn, alone on the machine.

    python -m benchmarks.pretraining.times [--threads 1]

Writes benchmarks/results/pretraining/<scale>/times.json: medians in milliseconds.
"""

import argparse
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import nn

from benchmarks.timing import device, medians_ms, write

from .runs import FAMILIES, PAIR, Run, Scale, is_compiled, scale
from .train import TRAINED_WITH, Loss, build, compile_layers, loss_on, optimizer_of, training_step

REPEATS = 30


def prepared(model: str, family: str, size: Scale) -> tuple[Run, nn.Module, Loss, torch.Tensor]:
    """Return a run, its new model, its loss, compiled as in training, and rows `[B, S]`."""
    run = Run(study="scratch", model=model, family=family, seed=0, learning_rate=1e-4, steps=1, warm_up=0)
    made, loss_of = build(run, size).to(device()), loss_on
    if is_compiled(run, size) and size.by_layer:
        compile_layers(made)
    elif is_compiled(run, size):
        loss_of = torch.compile(loss_on)
    ids = torch.randint(size.vocabulary, (size.batch, size.length), device=device())
    return run, made, loss_of, ids


def step_of(model: str, family: str, size: Scale) -> Callable[[], float]:
    """Return a training step of a new model."""
    run, made, loss_of, ids = prepared(model, family, size)
    return partial(training_step, made, loss_of, optimizer_of(made, run), ids, **TRAINED_WITH[family])


def time_steps(size: Scale, families: Sequence[str], models: Sequence[str]) -> None:
    """Time those models of those families, and write it."""
    result = {}
    for family in families:
        torch.compiler.reset()  # Dynamo keeps few graphs of one function, and runs the others uncompiled
        taken = medians_ms([step_of(model, family, size) for model in models], REPEATS)
        result[family] = dict(zip(models, (round(milliseconds, 2) for milliseconds in taken), strict=True))
        print(family, result[family], flush=True)
    write(f"pretraining/{size.name}/times.json", result)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    time_steps(scale(), FAMILIES, PAIR)


if __name__ == "__main__":
    main()
