"""Mutated checkpoints meet every command.

python -m tests.campaigns.fuzz --cases 10000 --seed 0     # many cases, from a seed on
python -m tests.campaigns.fuzz --seed 12345 -v            # one again, with all it says
"""

import argparse
import shlex
import shutil
import sys
from pathlib import Path

from .. import reliability
from ..reliability import FAILED
from .campaign import Tally, run_many, try_seed
from .children import SECONDS
from .prepared import build_starts, prepared

PROGRAM = "python -m tests.campaigns.fuzz"


def main() -> int:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=1, metavar="N", help="how many (default: 1)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the first (default: 0)")
    parser.add_argument("--only", metavar="DRIVER", help="convert, verify, inspect, card, push or load_hc")
    parser.add_argument("--workers", type=int, default=2, help="processes side by side (default: 2)")
    parser.add_argument("--seconds", type=float, default=SECONDS, help=f"limit of a command (default: {SECONDS})")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="with one case: keep its files there")
    parser.add_argument("--write", action="store_true", help="write the counts to docs/reliability.json and the page")
    parser.add_argument("-v", "--verbose", action="store_true", help="with one case: say what it is and what it said")
    options = parser.parse_args()
    with prepared() as place:
        starts = build_starts(place)
        return (_one if options.cases == 1 else _many)(options, starts, place / "cases")


def _one(options: argparse.Namespace, starts: Path, place: Path) -> int:
    case, result, ended = try_seed(options.seed, starts, place / "0", options.only, seconds=options.seconds)
    if options.verbose:
        print(*(f"- {text}" for text in case.said), sep="\n")
        print(f"$ {case.driver if case.driver == 'load_hc' else 'hf-hyperconn'} {shlex.join(case.arguments)}")
        print(ascii(ended.stdout) if "\x1b" in ended.stdout else ended.stdout, end="")
        print(ascii(ended.stderr) if "\x1b" in ended.stderr else ended.stderr, end="")
        print(f"exit code {ended.code}, {ended.seconds:.1f} s, {ended.peak / 2**20:.0f} MiB")
    print(f"{result.outcome}: {result.reason}")
    if options.keep:
        shutil.move(place / "0", options.keep)
    return result.outcome == FAILED


def _many(options: argparse.Namespace, starts: Path, place: Path) -> int:
    only = f" --only {options.only}" if options.only else ""
    tally = Tally(options.cases, f"{PROGRAM} --seed {{}}{only} -v")
    seeds = range(options.seed, options.seed + options.cases)
    for result in run_many(seeds, starts, place, options.only, options.workers, options.seconds):
        tally.add(result)
    print(tally.table())
    if tally.failed:
        print(f"\nfailures by kind:\n{tally.kinds()}")
    if options.write:
        reliability.write("cases", {"seed": options.seed, "seconds": round(tally.seconds), "counts": tally.counts})
    return bool(tally.failed) or tally.done != options.cases


if __name__ == "__main__":
    sys.exit(main())
