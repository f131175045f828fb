"""Train the models of a study, one after the other; what was interrupted goes on, what is done is not done again.

    python -m benchmarks.pretraining --studies tuning scratch --minutes 50
    python -m benchmarks.pretraining --list

Each run writes a line into a file of benchmarks/results/pretraining/<scale>; `python -m benchmarks.pretraining.page`
makes tables and plots of them. What a run needs to go on lies under build/pretraining.
"""

import argparse
import time
from functools import partial

import torch

from .resuming import train_all
from .runs import STUDIES, scale
from .train import is_done, train


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=list(STUDIES))
    parser.add_argument("--only", default="", help="runs with this in their name, for one of several processes")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--threads", type=int, help="of the processor")
    parser.add_argument("--list", action="store_true", help="only say which runs are done")
    arguments = parser.parse_args()
    deadline = time.monotonic() + 60 * arguments.minutes
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    listed = [run for study in arguments.studies for run in STUDIES[study](scale())]
    runs = {run.id: run for run in listed if arguments.only in run.id or run.study == "base"}
    if arguments.list:
        print("\n".join(f"{'done' if is_done(run) else '    '} {name}" for name, run in runs.items()))
        return
    train_all((name, partial(train, run, deadline)) for name, run in runs.items() if not is_done(run))


if __name__ == "__main__":
    main()
