"""Train the models of the vision study, one after the other; what was interrupted goes on, what is done stays.

    python -m benchmarks.vision --images cifar10.tar.gz --mnist mnist.tar.gz --minutes 50
    python -m benchmarks.vision --list

Each is an archive or a folder with train/CLASS/FILE and test/CLASS/FILE. Each run writes a line into a file of
benchmarks/results/vision; `python -m benchmarks.vision.report` makes tables of them. The committed results are of the
images whose hashes they have; with others, take those away first.
"""

import argparse
import time
from functools import partial
from pathlib import Path

import torch

from benchmarks.pretraining.resuming import train_all

from .images import read
from .studies import STUDIES
from .train import is_done, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=Path, help="what the ViT tells apart: CIFAR-10")
    parser.add_argument("--mnist", type=Path, help="what the DiT takes noise off: MNIST")
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--threads", type=int, default=1, help="of the processor")
    parser.add_argument("--list", action="store_true", help="only say which runs are done")
    options = parser.parse_args()
    runs = list(dict.fromkeys(run for study in options.studies for run in STUDIES[study]()))
    if options.list:
        print("\n".join(f"{'done' if is_done(run) else '    '} {run.id}" for run in runs))
        return
    places = {"cifar10": options.images, "mnist": options.mnist}
    missing = {run.text for run in runs if places[run.text] is None and not is_done(run)}
    if missing:
        parser.error(f"images to train on are missing: give {' and '.join(_option(name) for name in sorted(missing))}")
    torch.set_num_threads(options.threads)
    deadline = time.monotonic() + 60 * options.minutes
    unfinished = (run for run in runs if not is_done(run))
    calls = ((run.id, partial(train, run, read(places[run.text]), deadline)) for run in unfinished)
    train_all(calls, seconds="cpu_seconds_a_step")


def _option(name: str) -> str:
    return {"cifar10": "--images ARCHIVE", "mnist": "--mnist ARCHIVE"}[name]


if __name__ == "__main__":
    main()
