"""Disks that fill up at every write, or that can't be written to; with room again, the same command completes.

python -m tests.campaigns.fuzz.disks                # every page, file and limit: minutes
python -m tests.campaigns.fuzz.disks --step 16      # one in sixteen

Disks are made in a mount namespace of their own (`unshare -rm`). Where that is not allowed, it exits with 77.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import NamedTuple

from hf_hyperconn.conversion import cli
from hf_hyperconn.conversion.checkpoint.record import RECORD
from tests.test_interruption import contents

from .. import reliability
from .children import FILE_SIZE, Ended, side_by_side
from .commands import run_here
from .hub_process import Running, hub_process
from .judge import Broken, check_end, check_printed
from .mutations.values import read_json, write_json
from .snapshot import snapshot
from .starts import build_starts, prepared

NOT_ALLOWED = 77
RENAMED = re.compile(r"\.replaced-[\d-]+/")
INSIDE = "HF_HYPERCONN_FUZZ_DISKS"
PAGE = 4096
LARGE = 2**26
SMALLEST = 2 * PAGE  # of the limits of files, which what a command prints must stay below


class Fault(NamedTuple):
    """What a disk refuses: bytes beyond a size, files beyond a number, long files, or everything."""

    size: int = LARGE
    files: int | None = None
    longest: int = FILE_SIZE
    read_only: bool = False

    @property
    def kind(self) -> str:
        """Of the fault, for the table."""
        if self.read_only:
            return "read-only"
        if self.size != LARGE:
            return "no more bytes"
        return "no longer files" if self.files is None else "no more files"


class Kind(NamedTuple):
    """A command that writes.

    arguments: of the command line. before: makes what is on the disk already, in the folder that it is given.
    writes: what may change on the disk. disk: which folder of the place is on it. only_reads: a disk that can't be
    written to doesn't stop it, it then writes nothing.
    """

    arguments: list[str]
    before: Callable[[Path, Path], None]
    writes: tuple[str, ...]
    disk: str = "work"
    only_reads: bool = False


def _nothing(starts: Path, work: Path) -> None:
    """Leave the disk empty."""


def _old(starts: Path, work: Path) -> None:
    shutil.copytree(starts / "conversions" / "llama", work / "out")


def _conversion(starts: Path, work: Path) -> None:
    shutil.copytree(starts / "conversions" / "llama", work / "hc")


def _unverified(starts: Path, work: Path) -> None:
    _conversion(starts, work)
    write_json(work / "hc" / RECORD, {**read_json(work / "hc" / RECORD), "verification": None})


CONVERT = ["convert", "../base", "out", "-n", "4", "-q", "--verify"]
KINDS = {
    "convert": Kind([*CONVERT, "structure"], _nothing, ("out",)),
    "convert --force": Kind([*CONVERT, "structure", "--force"], _old, ("out",)),
    "verify": Kind(
        ["verify", "hc", "--against", "../base", "--mode", "structure"],
        _unverified,
        (f"hc/{RECORD}",),
        only_reads=True,
    ),
    "card": Kind(
        ["card", "hc", "--results", "../results.json"],
        _conversion,
        ("hc/README.md", "hc/Notice"),
    ),
    "plot": Kind(["plot", "hc", "--kind", "connections"], _conversion, ("hc/figures/connections.png",)),
    "push": Kind(["push", "../hc", "me/case", "-q"], _nothing, (), disk="home"),
}


@contextmanager
def _disk(folder: Path) -> Iterator[Path]:
    """A file system of its own, at a folder."""
    _run("mount", "-t", "tmpfs", "-o", f"size={LARGE}", "none", str(folder))
    try:
        yield folder
    finally:
        _run("umount", "--lazy", str(folder))


def _limit(disk: Path, fault: Fault) -> None:
    """Leave room for as many bytes and files beyond those that are there, or for none."""
    used = os.statvfs(disk)
    size = (used.f_blocks - used.f_bfree) * used.f_frsize + fault.size
    files = 0 if fault.files is None else used.f_files - used.f_ffree + fault.files
    mode = "ro" if fault.read_only else "rw"
    _run("mount", "-o", f"remount,size={size},nr_inodes={files},{mode}", str(disk))


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


class Rig:
    """A place where commands run. made: what each makes undisturbed."""

    def __init__(self, starts: Path, place: Path, made: dict[str, dict[str, str]]):
        self.starts, self.place, self.made = starts, place, made

    @contextmanager
    def _filled(self, name: str) -> Iterator[tuple[Path, Running | None]]:
        """The disk of a command, with what is on it before, and the Hub that a push goes to."""
        kind, place = KINDS[name], self.place
        for folder in ("work", "home", "tmp", "hub"):
            (place / folder).mkdir(parents=True)
        shutil.copytree(self.starts / "bases" / "llama", place / "base")
        shutil.copytree(self.starts / "conversions" / "llama", place / "hc")
        shutil.copy(self.starts / "results.json", place)
        try:
            with (
                _disk(place / kind.disk) as disk,
                hub_process(place / "hub", {}) if name == "push" else nullcontext() as hub,
            ):
                kind.before(self.starts, disk)
                yield disk, hub
        finally:
            shutil.rmtree(place)

    def _command(self, name: str, hub: Running | None, longest: int = FILE_SIZE) -> Ended:
        return run_here(self.place, lambda: _believing(KINDS[name].arguments), hub, file_size=longest)

    def _sources(self) -> list[dict]:
        return [snapshot(self.place / source) for source in ("base", "hc")]

    def measure(self, name: str) -> list[int]:
        """Run a command undisturbed, keep what it makes, and return the bytes of each file that it writes."""
        with self._filled(name) as (disk, hub):
            before = contents(disk)
            ended = self._command(name, hub)
            if ended.code:
                raise RuntimeError(f"{name} fails undisturbed: {ended.stderr}")
            self.made[name], now = _held(disk), contents(disk)
            if "out" in KINDS[name].writes:  # each of its files is written anew
                before = {}
            new = [file for file in now if not RENAMED.search(file) and before.get(file) != now[file]]
            return [(disk / file).stat().st_size for file in new]

    def attempt(self, name: str, fault: Fault) -> tuple[bool, str | None]:
        """Run a command with a fault, and hold what is left against the promises.

        Returns whether the fault stopped it, and which promise was broken.
        """
        kind = KINDS[name]
        try:
            with self._filled(name) as (disk, hub):
                before, sources = contents(disk), self._sources()
                _limit(disk, fault)
                ended = self._command(name, hub, fault.longest)
                check_end(ended)
                check_printed(ended)
                writes_nothing = fault.read_only and kind.only_reads
                if writes_nothing and ended.code:
                    raise Broken(f"it only reads, and fails: {ended.stderr.strip()[-200:]}")
                complete = not (ended.code or writes_nothing)
                _check_left(kind, disk, before, self.made[name], whole=complete)
                if not complete:
                    if hub and any(len(contents(folder)) > 1 for folder in hub.repos().get("me/case", {}).values()):
                        raise Broken("the Hub holds something")
                    _limit(disk, Fault())
                    again = self._command(name, hub)
                    if again.code:
                        raise Broken(f"with room again, it fails: {again.stderr.strip()[-200:]}")
                    _check_left(kind, disk, before, self.made[name], whole=True)
                if sources != self._sources():
                    raise Broken("the source has changed")
                return ended.code != 0, None
        except Broken as broken:
            return True, str(broken)[:300]


def _believing(arguments: list[str]) -> int:
    """Run the command line on a disk that seems to have room: it fills up while the command runs."""
    shutil.disk_usage = lambda path: shutil._ntuple_diskusage(2**50, 0, 2**50)
    return cli.main(arguments)


def _check_left(kind: Kind, disk: Path, before: dict, made: dict, whole: bool) -> None:
    """Refuse files that are neither as before nor as they should be; of OUT all must be one or the other."""
    if kind.disk == "home":
        return
    now = _held(disk)
    if whole:
        if now != made:
            raise Broken(f"it ends well, and differs: {sorted(dict(now.items() ^ made.items()))[:3]}")
        return
    works = {name: value for name, value in now.items() if name.startswith(".out.incomplete/")}
    now = {name: value for name, value in now.items() if name not in works}
    if "out" in kind.writes:
        if now not in (before, made):
            raise Broken(f"OUT is neither as it was nor whole: {len(now)} files")
        return
    for name in sorted(now.keys() | before.keys()):
        accepted = (before.get(name), made.get(name)) if name in kind.writes else (before.get(name),)
        if now.get(name) not in accepted:
            raise Broken(f"{name} is neither as it was nor as it should be")


def _held(disk: Path) -> dict[str, str]:
    """Return the contents of a disk, with one name for what was renamed at any time."""
    return {RENAMED.sub(".replaced/", name): value for name, value in contents(disk).items()}


def faults(sizes: list[int], step: int) -> Iterator[Fault]:
    """Yield the faults for a command that makes files of these sizes: every page, file and length, and no writing.

    step: one in so many.
    """
    yield Fault(read_only=True)
    pages = sum(-(-size // PAGE) for size in sizes) + 4
    yield from (Fault(size=PAGE * count) for count in range(0, pages, step))
    yield from (Fault(files=count) for count in range(0, len(sizes) + 6, step))
    lengths = sorted({size - 1 for size in sizes if size > SMALLEST})
    yield from (Fault(longest=length) for length in [*lengths[::step], *([SMALLEST] if lengths else [])])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--step", type=int, default=1, metavar="N", help="try one fault in N (default: every one)")
    parser.add_argument("--only", metavar="COMMAND", help=", ".join(KINDS))
    parser.add_argument("--workers", type=int, default=2, help="processes side by side (default: 2)")
    parser.add_argument("--write", action="store_true", help="write the counts to docs/reliability.json and the page")
    options = parser.parse_args()
    if INSIDE not in os.environ:
        if subprocess.run(["unshare", "-rm", "true"], stderr=subprocess.DEVNULL).returncode:
            print("skipped: this user may not mount a file system of their own (unshare -rm)")
            return NOT_ALLOWED
        command = ["unshare", "-rm", sys.executable, "-m", "tests.campaigns.fuzz.disks", *sys.argv[1:]]
        return subprocess.run(command, env={**os.environ, INSIDE: "1"}).returncode
    with prepared() as place:
        return run_all(options, place)


def run_all(options: argparse.Namespace, place: Path) -> int:
    """Try all commands with all faults, and print the counts."""
    start, starts = time.monotonic(), build_starts(place)
    tries, made = [], {}
    for name in KINDS if options.only is None else [options.only]:
        sizes = Rig(starts, place / "undisturbed", made).measure(name)
        tries += [(name, fault) for fault in faults(sizes, options.step)]

    def work(worker: int, tried: tuple[str, Fault]) -> list:
        name, fault = tried
        return [name, fault, *Rig(starts, place / f"worker {worker}", made).attempt(name, fault)]

    counts: dict[str, Counter] = defaultdict(Counter)
    for done, (name, fault, full, broken) in enumerate(side_by_side(tries, work, options.workers), start=1):
        fault = Fault(*fault)
        counts[f"{name}, {fault.kind}"] += Counter(tried=1, full=full, failed=bool(broken))
        if broken:
            print(f"FAILED {name}, {fault}: {broken}", flush=True)
        if done % 50 == 0 or done == len(tries):
            print(f"{done} of {len(tries)} disks, {time.monotonic() - start:.0f} s", file=sys.stderr)
    for kind, of in sorted(counts.items()):
        print(f"{kind:<40}{of['tried']:>6} disks {of['full']:>6} stopped it {of['failed']:>6} promises broken")
    if options.write:
        seconds, names = round(time.monotonic() - start), ("tried", "full", "failed")
        rows = {kind: {name: of[name] for name in names} for kind, of in sorted(counts.items())}
        reliability.write("disks", {"seconds": seconds, "counts": rows})
    total = sum(counts.values(), Counter())
    return bool(total["failed"]) or total["tried"] != len(tries)


if __name__ == "__main__":
    sys.exit(main())
