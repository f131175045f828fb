"""Train models of 24 layers with each kind of connection, new or continued; what was interrupted goes on.

    python -m benchmarks.depth --text books_train.txt --held-out books_valid.txt --minutes 50
    python -m benchmarks.depth --list

Each run writes a line into a file of benchmarks/results/pretraining/deep. A saturated base's go into the folder small,
and those of studies that begin with "wide", which are for a GPU, into the folder wide. The committed results are of
the books in books.txt; with another text, take those away first.
"""

import argparse
import time
from fnmatch import fnmatch
from functools import partial
from pathlib import Path

import torch

from benchmarks.pretraining.resuming import train_all
from benchmarks.pretraining.runs import Run, Scale
from benchmarks.pretraining.train import is_done, train

from .scales import WIDE
from .studies import OTHER_TEXT, STUDIES, size_of
from .text import another, given

STARTS = ("base", "trunk")  # studies of runs that others start from


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a file to train on")
    parser.add_argument("--held-out", type=Path, help="a file to evaluate on; by default the end of the other")
    parser.add_argument("--other-text", type=Path, nargs=2, help="to continue on too, and its held-out part")
    usual = [study for study in STUDIES if size_of(study) != WIDE]
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=usual, help="by default those for a CPU")
    parser.add_argument("--only", default="*", help="runs whose names match, as in 'scratch-*-keel-*'")
    parser.add_argument("--part", default="1/1", help="which of how many processes this is, as in 2/3")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop after so many")
    parser.add_argument("--threads", type=int, default=1, help="of the processor")
    parser.add_argument("--list", action="store_true", help="only say which runs are done")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    listed = {(size_of(study).name, run): size_of(study) for study in options.studies for run in STUDIES[study]()}
    starts = {run.start for _, run in listed if fnmatch(run.id, options.only)}
    runs = [(size, run) for (_, run), size in listed.items() if run.id in starts or fnmatch(run.id, options.only)]
    if options.list:
        print("\n".join(f"{'done' if is_done(run, size) else '    '} {size.name} {run.id}" for size, run in runs))
        return
    if options.text is None:
        parser.error("a text to train on is missing: give --text FILE")
    if options.other_text is None and any(run.text == OTHER_TEXT for _, run in runs):
        parser.error("a second text is missing: give --other-text FILE FILE, or choose other --studies")
    torch.set_num_threads(options.threads)
    deadline = time.monotonic() + 60 * options.minutes
    bases = [job for job in runs if job[1].study in STARTS]
    rest = [job for job in runs if job not in bases][part - 1 :: parts]
    files = (options.text, options.held_out)

    def train_on_text(size: Scale, run: Run) -> dict:
        if run.text == OTHER_TEXT:
            text = another(*files, *options.other_text, size.vocabulary)
        else:
            text = given(*files, size.vocabulary)
        return train(run, deadline, size=size, text=text)

    train_all((run.id, partial(train_on_text, size, run)) for size, run in (*bases, *rest) if not is_done(run, size))


if __name__ == "__main__":
    main()
