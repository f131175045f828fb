"""Signals at random moments into conversions and pushes; the same command, run again, completes.

python -m tests.campaigns.fuzz.signals --count 1000 --seed 0
"""

import argparse
import os
import random
import shutil
import signal
import sys
import time
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import LlamaForCausalLM

from hf_hyperconn.conversion import cli
from hf_hyperconn.conversion.convert import convert_checkpoint
from tests.conftest import llama_config
from tests.test_interruption import check_replaced, contents

from .. import reliability
from .children import Ended, call, side_by_side
from .commands import run_here
from .hub_process import Running, hub_process
from .judge import Broken
from .snapshot import snapshot
from .starts import prepared

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
# exit codes of a command that was cut off; 0 when it had ended before
CUT = {signal.SIGINT: (130,), signal.SIGTERM: (-15, 143, 130), signal.SIGKILL: (-9,)}
MEASURED_EVERY = 12  # signals, as the machine may be busy


class Result(NamedTuple):
    """What came of a signal: whether it cut the command off, and which promise was broken.

    seed: of the moment.
    """

    seed: int
    kind: str
    signal: str
    cut: bool
    broken: str | None


class Rig:
    """What commands are run on, and what they make when nobody disturbs them.

    base: a checkpoint of several shards, so large that copying takes a while. old: another conversion of it.
    """

    def __init__(self, place: Path):
        self.base, self.old, self.place = place / "base", place / "old", place

    def build(self) -> None:
        """Make base and old conversion, in a process of its own: threads may be left behind."""
        torch.manual_seed(0)
        config = llama_config(vocab_size=8000, hidden_size=256, intermediate_size=768, num_hidden_layers=4)
        LlamaForCausalLM(config).half().save_pretrained(self.base, max_shard_size="3MB")
        convert_checkpoint(str(self.base), self.old, hc_mult=2)

    def measure(self) -> None:
        """Measure the seconds of undisturbed commands, and keep their results."""
        self.before, self.old_contents, self.seconds, self.made = contents(self.base), contents(self.old), {}, {}
        for kind in KINDS:
            place = _fresh(self, self.place / "undisturbed", kind)
            with hub_process(place / "hub", {}) if kind == "push" else nullcontext() as hub:
                ended = run_here(place, lambda kind=kind: cli.main(KINDS[kind]), hub)
                if ended.code:
                    raise RuntimeError(f"{kind} fails undisturbed: {ended.stderr}")
                made = hub.repos()["me/case"]["main"] if hub else place / "work" / "out"
                self.made[kind] = contents(made)
            self.seconds[kind] = ended.seconds
            shutil.rmtree(place)


CONVERT = ["convert", "../base", "out", "-q", "--verify"]
KINDS = {
    "convert": [*CONVERT, "auto"],
    "convert, structure only": [*CONVERT, "structure"],
    "convert --force": [*CONVERT, "structure", "--force"],
    "convert, resumed": [*CONVERT, "auto"],
    "push": ["push", "hc", "me/case", "-q"],
}
AGAIN = ("push",)  # which, once they are done, may be done again


def send(rig: Rig, place: Path, kind: str, number: signal.Signals, seed: int) -> Result:
    """Send one signal into a command, at a random moment, and hold what is left against the promises."""
    pick = random.Random(seed)
    _fresh(rig, place, kind)
    before = {path: snapshot(path) for path in (rig.base, rig.old)}
    with hub_process(place / "hub", {}) if kind == "push" else nullcontext() as hub:

        def command(kill=None):
            return run_here(place, lambda: cli.main(KINDS[kind]), hub, kill=kill)

        if kind == "convert, resumed":
            out = place / "work" / "out"
            command((signal.SIGKILL, pick.uniform(0.2, 0.9) * rig.seconds[kind]))
            while out.exists():  # it had ended before
                shutil.rmtree(out)
                command((signal.SIGKILL, pick.uniform(0.2, 0.9) * rig.seconds[kind]))
        ended = command((number, pick.uniform(0, 1.1) * rig.seconds[kind]))
        cut = ended.code != 0
        try:
            _check_ended(ended, number)
            check = _check_hub if hub else _check_out
            check(rig, place, kind, hub, whole=not cut)
            if kind in AGAIN or (cut and not _is_made(rig, place, kind)):
                again = command()
                if again.code:
                    raise Broken(f"run again, it fails: {again.stderr.strip()[-200:]}")
                check(rig, place, kind, hub, whole=True)
            if any(snapshot(path) != was for path, was in before.items()):
                raise Broken("the source has changed")
        except (Broken, AssertionError) as broken:
            return Result(seed, kind, number.name, cut, str(broken)[:300])
    return Result(seed, kind, number.name, cut, None)


def _fresh(rig: Rig, place: Path, kind: str) -> Path:
    """Return a place for one run, with what is there before it."""
    for name in ("work", "home", "tmp", "hub"):
        (place / name).mkdir(parents=True)
    (place / "base").symlink_to(rig.base)
    if kind == "convert --force":
        shutil.copytree(rig.old, place / "work" / "out")
    if kind == "push":
        shutil.copytree(rig.old, place / "work" / "hc", copy_function=os.link)
    return place


def _check_ended(ended: Ended, number: signal.Signals) -> None:
    if ended.timed_out:
        raise Broken("hangs")
    if ended.code not in (0, *CUT[number]):
        raise Broken(f"exit code {ended.code}: {ended.stderr.strip()[-200:]}")
    if "Traceback" in ended.stderr:
        raise Broken(f"traceback: {ended.stderr.strip()[-200:]}")


def _check_out(rig: Rig, place: Path, kind: str, hub: None, whole: bool) -> None:
    """Refuse an OUT that is neither whole nor absent, or in the place of an earlier one neither old nor new."""
    out, made = place / "work" / "out", rig.made[kind]
    if kind == "convert --force":
        check_replaced(out, rig.old_contents, made, whole=whole)
    elif whole:
        if contents(out) != made:
            raise Broken("OUT is another than undisturbed")
        if os.listdir(out.parent) != ["out"]:
            raise Broken(f"left behind: {sorted(os.listdir(out.parent))}")
    elif out.exists() and contents(out) != made:
        raise Broken("OUT is there, and not whole")


def _is_made(rig: Rig, place: Path, kind: str) -> bool:
    """Return whether a new OUT had its name when the command was cut off, and run again is refused."""
    out = place / "work" / "out"
    return out.exists() and contents(out) == rig.made[kind]


def _check_hub(rig: Rig, place: Path, kind: str, hub: Running, whole: bool) -> None:
    """Refuse a part of the folder on the Hub, and a changed folder."""
    held = [contents(folder) for folder in hub.repos().get("me/case", {}).values()]
    if any(len(files) > 1 and files != rig.made[kind] for files in held):
        raise Broken("the Hub holds a part")
    if whole and rig.made[kind] not in held:
        raise Broken("the Hub does not hold it")
    if contents(place / "work" / "hc") != rig.old_contents:
        raise Broken("the folder has changed")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, metavar="N", help="signals (default: 1000)")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the moments (default: 0)")
    parser.add_argument("--workers", type=int, default=2, help="processes side by side (default: 2)")
    parser.add_argument("--write", action="store_true", help="write the counts to docs/reliability.json and the page")
    options = parser.parse_args()
    with prepared() as place:
        return run_all(options, place)


def run_all(options: argparse.Namespace, place: Path) -> int:
    start = time.monotonic()
    rigs: dict[int, Rig] = {}
    built = Rig(place)
    call(built.build, place / "building")

    def work(worker: int, i: int) -> list:
        rig = rigs.setdefault(worker, Rig(place / f"worker {worker}"))
        if not hasattr(rig, "made"):
            shutil.copytree(built.base, rig.base)
            shutil.copytree(built.old, rig.old)
        if not hasattr(rig, "made") or i // options.workers % MEASURED_EVERY == 0:
            rig.measure()
        folder = rig.place / "signal"
        kind, number = list(KINDS)[i % len(KINDS)], SIGNALS[i // len(KINDS) % len(SIGNALS)]
        result = send(rig, folder, kind, number, options.seed + i)
        shutil.rmtree(folder)
        return list(result)

    counts = {kind: Counter() for kind in KINDS}
    for done, row in enumerate(side_by_side(range(options.count), work, options.workers), start=1):
        result = Result(*row)
        counts[result.kind] += Counter(sent=1, cut=result.cut, failed=bool(result.broken))
        if result.broken:
            print(f"FAILED {result.kind}, {result.signal}, seed {result.seed}: {result.broken}", flush=True)
        if done % 50 == 0 or done == options.count:
            print(f"{done} of {options.count} signals, {time.monotonic() - start:.0f} s", file=sys.stderr)
    for kind, of in counts.items():
        print(f"{kind:<26}{of['sent']:>6} signals {of['cut']:>6} before the end {of['failed']:>6} promises broken")
    if options.write:
        seconds, names = round(time.monotonic() - start), ("sent", "cut", "failed")
        rows = {kind: {name: of[name] for name in names} for kind, of in counts.items()}
        reliability.write("signals", {"seed": options.seed, "seconds": seconds, "counts": rows})
    total = sum(counts.values(), Counter())
    return bool(total["failed"]) or total["sent"] != options.count


if __name__ == "__main__":
    sys.exit(main())
