"""Measurement of time and memory, and results as files and tables, for all benchmarks."""

import gc
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import torch

RESULTS = Path(__file__).parent / "results"
WARM_UP, REPEATS = 4, 15
PROCESSES = 3  # that memory is the median of: one in some holds a mebibyte or two more

# without them, glibc returns every large buffer to the system and page faults are what is measured
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "100000000000", "MALLOC_TRIM_THRESHOLD_": "100000000000"}
# with these it returns every buffer at once, so that a process holds what is in use
EACH_ITS_MAPPING = dict.fromkeys(ALLOCATOR, "65536")


def keep_memory() -> None:
    """Start the script again with an allocator that keeps what it has."""
    if not ALLOCATOR.items() <= os.environ.items():
        os.execve(sys.executable, sys.orig_argv, {**os.environ, **ALLOCATOR})


def device() -> str:
    """Return where the benchmarks run, "cuda" or "cpu"."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def device_name() -> str:
    """Return the accelerator's name, or the processor's with the number of threads."""
    if device() == "cuda":
        return torch.cuda.get_device_name()
    return f"{processor()}, {torch.get_num_threads()} threads"


def processor() -> str:
    """Return the processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def medians_ms(
    functions: Sequence[Callable[[], object]],
    repeats: int = REPEATS,
    warm_up: int = WARM_UP,
    clock: Callable[[], float] = time.perf_counter,
) -> list[float]:
    """Return the median time of a call of each function, in milliseconds; they are called in turn.

    clock: tells seconds, by default those on the wall.
    """
    times = [[] for _ in functions]
    for _ in range(warm_up + repeats):
        for function, taken in zip(functions, times, strict=True):
            if device() == "cuda":
                torch.cuda.synchronize()
            started = clock()
            function()
            if device() == "cuda":
                torch.cuda.synchronize()
            taken.append(clock() - started)
    return [1e3 * statistics.median(taken[warm_up:]) for taken in times]


def held() -> int:
    """Return the bytes of memory in use."""
    return torch.cuda.memory_allocated() if device() == "cuda" else psutil.Process().memory_info().rss


def kept_mib(forward: Callable[[], torch.Tensor]) -> float:
    """Return the MiB that a forward, which returns a loss, keeps for its backward.

    They are exact where `EACH_ITS_MAPPING` is set.
    """
    forward().backward()
    gc.collect()
    before = held()
    loss = forward()
    kept = held() - before
    loss.backward()
    return kept / 2**20


def in_a_process(module: str, *arguments: str, environment: Mapping[str, str]) -> Any:
    """Return the JSON that a benchmark's module prints last, in a process that has more in its environment.

    Raises `RuntimeError`, with the end of what it says, when it fails.
    """
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environment})
    if done.returncode:
        raise RuntimeError(f"{' '.join([module, *arguments])} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def versions() -> dict[str, str]:
    """Return the device, and the versions of what runs on it."""
    return {"device": device_name(), "torch": torch.__version__, "python": platform.python_version()}


def file_name(benchmark: str) -> str:
    """Return the name of a benchmark's result, which is another one for a GPU."""
    return f"{benchmark}.json" if device() == "cpu" else f"{benchmark}_cuda.json"


def measured(name: str) -> list[dict]:
    """Return the rows of benchmarks/results/NAME, if there are some of this device and these versions."""
    path = RESULTS / name
    known = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return known["rows"] if known.items() >= versions().items() else []


def write(name: str, result: dict) -> None:
    """Write benchmarks/results/NAME, with the device and the versions."""
    path = RESULTS / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**versions(), **result}, indent=1) + "\n")


def markdown(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table; nothing when it has no rows."""
    titles, *body = (f"| {' | '.join(cells)} |" for cells in (head, *rows))
    return "\n".join([titles, "|" + "---|" * len(head), *body]) if body else ""


def between_marks(page: str, name: str, body: str) -> str:
    """Return the page with another body between the marks of that name."""
    marks = rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)"
    return re.sub(marks, lambda match: f"{match[1]}{body}\n{match[2]}", page, flags=re.DOTALL)


def with_tables(page: str, tables: Mapping[str, str]) -> str:
    """Return the page with these tables, by name, between their marks.

    Raises `ValueError` when a table has no place.
    """
    for name, body in tables.items():
        if f"<!-- {name} -->" not in page:
            raise ValueError(f"the page has no mark for the table {name!r}.")
        page = between_marks(page, name, body)
    return page


def fill(page: str, name: str, result: dict, table: str) -> str:
    """Return the page with a table, its device and its version of torch between the marks of that name."""
    return between_marks(page, name, f"{result['device']}, torch {result['torch']}.\n\n{table}")
