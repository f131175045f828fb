"""Many cases, in worker processes side by side, and what came of them."""

import os
import re
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from ..reliability import FAILED, OUTCOMES
from . import cases, judge
from .children import SECONDS
from .commands import run_case
from .workers import side_by_side


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
    """The result of every seed, as they come.

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
        """Counts by command and outcome."""
        lines = [f"{'':<10}" + "".join(f"{outcome:>22}" for outcome in OUTCOMES)]
        for driver, counts in self.counts.items():
            lines.append(f"{driver:<10}" + "".join(f"{counts[outcome]:>22}" for outcome in OUTCOMES))
        return "\n".join(lines)

    def kinds(self) -> str:
        """Failures of one kind together, with a seed of each."""
        kinds: dict[tuple[str, str], list[int]] = {}
        for result in self.failed:
            kind = re.sub(r"'[^']*'|\"[^\"]*\"|\d+", "_", result.reason)[:110]
            kinds.setdefault((result.driver, kind), []).append(result.seed)
        rows = sorted(kinds.items(), key=lambda row: -len(row[1]))
        return "\n".join(f"{len(seeds):>5} {driver:<8} {kind}   (seed {seeds[0]})" for (driver, kind), seeds in rows)
