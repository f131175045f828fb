"""Forks of this process: a child for each case, with limits of time and memory, and workers side by side."""

import gc
import io
import json
import os
import resource
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

SECONDS = 30
MEMORY = 2_500_000_000  # bytes of private memory, what was imported included
FILE_SIZE = 2**29  # of a file that is written: sparse ones are copied whole
CRASHED = 70  # exit code for what no command lets out


@dataclass(frozen=True)
class Ended:
    """How a child ended.

    code: its exit code; negative for a signal.
    seconds: how long it ran. peak: bytes of memory it held at most.
    timed_out: whether it was killed because its time was over.
    stdout, stderr: what it printed.
    """

    code: int
    seconds: float
    peak: int
    timed_out: bool
    stdout: str
    stderr: str


def run(
    work: Callable[[], int],
    log: Path,
    *,
    folder: Path | None = None,
    environment: dict[str, str] | None = None,
    seconds: float = SECONDS,
    memory: int | None = MEMORY,
    file_size: int = FILE_SIZE,
    kill: tuple[int, float] | None = None,
) -> Ended:
    """Call `work` in a fork of this process, which must have no other threads, and wait for its end.

    work: returns an exit code; what it raises is printed as a traceback, as Python does.
    log: what the child prints goes to files of this name with `.out` and `.err` added.
    folder: the child's working directory. environment: variables that it has besides.
    seconds, memory, file_size: its limits.
    kill: a signal, and the seconds after which it is sent.
    """
    out, err = log.with_name(f"{log.name}.out"), log.with_name(f"{log.name}.err")
    ready, begun = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if not (child := os.fork()):
        _work_and_exit(work, (out, err), folder, environment or {}, (memory, file_size), begun)
    os.close(begun)
    os.read(ready, 1)  # it is about to work, or has ended
    os.close(ready)
    start = time.monotonic()
    handle = os.pidfd_open(child)
    if kill is not None:
        number, delay = kill
        if not _ended(handle, delay):
            os.kill(child, number)
    timed_out = not _ended(handle, seconds)
    os.close(handle)
    if timed_out:
        os.killpg(child, signal.SIGKILL)
    _, status, usage = os.wait4(child, 0)
    taken = time.monotonic() - start
    printed = [path.read_bytes().decode(errors="surrogateescape") for path in (out, err)]
    return Ended(os.waitstatus_to_exitcode(status), taken, usage.ru_maxrss * 1024, timed_out, *printed)


def call(work: Callable[[], None], log: Path) -> None:
    """Do `work` in a child without limits, for what leaves threads behind. Raises `RuntimeError` when it fails."""
    ended = run(lambda: work() or 0, log, memory=None, seconds=600, file_size=resource.RLIM_INFINITY)
    if ended.code:
        raise RuntimeError(ended.stderr)


def _ended(handle: int, seconds: float) -> bool:
    """Return whether a process ends within some seconds."""
    return bool(select.select([handle], [], [], seconds)[0])


def _work_and_exit(work, logs, folder, environment, limits, begun) -> None:
    code = CRASHED
    try:
        os.setsid()
        # a suite in the background of a shell ignores it
        signal.signal(signal.SIGINT, signal.default_int_handler)
        for number, path in enumerate(logs, start=1):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), number)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        sys.stdin = io.TextIOWrapper(io.FileIO(0, closefd=False))
        sys.stdout = io.TextIOWrapper(io.FileIO(1, "w", closefd=False), encoding="utf-8", write_through=True)
        sys.stderr = io.TextIOWrapper(
            io.FileIO(2, "w", closefd=False), encoding="utf-8", errors="backslashreplace", write_through=True
        )
        os.environ.update(environment)
        if folder is not None:
            os.chdir(folder)
        torch.set_num_threads(1)  # makes its pool of threads anew, which several threads at once would not
        memory, file_size = limits
        if memory is not None:
            resource.setrlimit(resource.RLIMIT_DATA, (memory, memory))
        resource.setrlimit(resource.RLIMIT_FSIZE, (file_size, file_size))
        os.write(begun, b".")
        code = work()
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # from here on the command has ended
    except SystemExit as error:  # argparse
        code = error.code if isinstance(error.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def side_by_side(items: Sequence, work: Callable[[int, object], list], workers: int) -> Iterator[list]:
    """Yield the result of `work(worker, item)` for every item, as it comes; it must go through JSON in a line.

    This process must have no other threads. Raises `RuntimeError` when a worker fails; it says why on stderr.
    """
    gc.freeze()
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    children = []
    for worker in range(workers):
        if not (child := os.fork()):
            os.close(reading)
            _work_on(worker, items[worker::workers], work, writing)
        children.append(child)
    os.close(writing)
    try:
        with open(reading, encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)
    except BaseException:
        for child in children:
            os.kill(child, signal.SIGTERM)
        raise
    finally:
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise RuntimeError(f"workers ended with {codes}")


def _work_on(worker: int, items: Sequence, work: Callable[[int, object], list], writing: int) -> None:
    code, item = 1, None
    try:
        with open(writing, "wb", buffering=0) as pipe:
            for item in items:
                line = json.dumps(work(worker, item)).encode() + b"\n"
                assert len(line) < 4096, "written in one piece, so that lines of workers don't mix"
                pipe.write(line)
        code = 0
    except BaseException:
        print(f"the harness itself fails with {item}", file=sys.stderr)
        traceback.print_exc()
    finally:
        os._exit(code)
