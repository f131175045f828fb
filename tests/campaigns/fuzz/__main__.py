"""Mutated checkpoints meet every command.

python -m tests.campaigns.fuzz --cases 10000 --seed 0     # many cases, from a seed on
python -m tests.campaigns.fuzz --seed 12345 -v            # one again, with all it says
"""

import argparse
import os
import re
import shlex
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .. import reliability
from ..reliability import FAILED, OUTCOMES
from . import cases, judge
from .children import SECONDS, side_by_side
from .commands import run_case
from .starts import build_starts, prepared

PROGRAM = "python -m tests.campaigns.fuzz"


class Result(NamedTuple):
    """What came of a case."""

    seed: int
    driver: str
    outcome: str
    reason: str
    seconds: float


def try_seed(seed: int, starts: Path, place: Path, driver: str | None, **options) -> tuple[cases.Case, Result, object]:
    """Make the case of a seed in `place`, run it and judge it. Returns how its command ended, too.

    options: as for `run_case`.
    """
    start = time.monotonic()
    place.mkdir(parents=True)
    case = cases.make(seed, starts, place, driver)
    before = judge.look(case)
    ended, repos = run_case(case, starts, **options)
    outcome, reason = judge.judge(case, before, ended, repos)
    return case, Result(seed, case.driver, outcome, reason, time.monotonic() - start), ended


def run_many(
    seeds: range, starts: Path, place: Path, driver: str | None = None, workers: int = 2, seconds: float = SECONDS
) -> Iterator[Result]:
    """Yield the result of every seed, as they come.

    place: an empty folder; of each case nothing is left there.
    """

    def work(worker: int, seed: int) -> list:
        folder = place / str(worker)
        _, result, _ = try_seed(seed, starts, folder, driver, seconds=seconds)
        shutil.rmtree(os.fsencode(folder))
        return list(result._replace(reason=result.reason[:300]))

    return (Result(*row) for row in side_by_side(seeds, work, workers))


class Tally:
    """Counts results, and says those that must not be.

    started: of the clock. failed: the results of cases that failed.
    """

    def __init__(self, total: int, replay: str):
        self.counts: dict[str, Counter] = {driver: Counter() for driver in cases.DRIVERS}
        self.failed: list[Result] = []
        self.seconds = 0.0
        self._total, self._replay, self._start = total, replay, time.monotonic()

    def add(self, result: Result) -> None:
        self.counts[result.driver][result.outcome] += 1
        self.seconds = time.monotonic() - self._start
        if result.outcome == FAILED:
            self.failed.append(result)
            print(f"FAILED {result.driver}: {result.reason}\n       {self._replay.format(result.seed)}", flush=True)
        if self.done % 50 == 0 or self.done == self._total:
            rate = self.done / self.seconds
            print(
                f"{self.done} of {self._total} cases, {rate:.1f} a second, {len(self.failed)} failed", file=sys.stderr
            )

    @property
    def done(self) -> int:
        """How many cases there were."""
        return sum(counts.total() for counts in self.counts.values())

    def table(self) -> str:
        """Return counts by command and outcome."""
        lines = [f"{'':<10}" + "".join(f"{outcome:>22}" for outcome in OUTCOMES)]
        for driver, counts in self.counts.items():
            lines.append(f"{driver:<10}" + "".join(f"{counts[outcome]:>22}" for outcome in OUTCOMES))
        return "\n".join(lines)

    def kinds(self) -> str:
        """Return a table of failures by kind, with a seed of each."""
        kinds: dict[tuple[str, str], list[int]] = {}
        for result in self.failed:
            kind = re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "_", result.reason)[:110]
            kinds.setdefault((result.driver, kind), []).append(result.seed)
        rows = sorted(kinds.items(), key=lambda row: -len(row[1]))
        return "\n".join(f"{len(seeds):>5} {driver:<8} {kind}   (seed {seeds[0]})" for (driver, kind), seeds in rows)


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
