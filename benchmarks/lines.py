"""Results of runs as JSON lines: a file for each study, a line for each run."""

import fcntl
import json
import os
from functools import lru_cache
from pathlib import Path

from hf_hyperconn.conversion.files.writing import replace_file


def result_in(path: Path, name: str) -> dict | None:
    """Return the result of the run of that name in a file; None where there is none."""
    line = _lines(path, _version(path)).get(name)
    if line is None:
        return None
    result = json.loads(line)
    del result["run"]
    return result


def put(path: Path, name: str, result: dict) -> None:
    """Write the result of a run into a file, in the place of an earlier one; other processes may do so meanwhile."""
    path.parent.mkdir(parents=True, exist_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        line = json.dumps({"run": name, **result}, separators=(",", ":"), ensure_ascii=False)
        lines = {**_lines(path, _version(path)), name: line}
        replace_file(path, "".join(f"{lines[run]}\n" for run in sorted(lines)).encode())
    finally:
        os.close(folder)


def _version(path: Path) -> tuple[int, int] | None:
    return (path.stat().st_mtime_ns, path.stat().st_ino) if path.exists() else None


@lru_cache(maxsize=16)
def _lines(path: Path, version: tuple[int, int] | None) -> dict[str, str]:
    """Return the lines of a file, by the runs' names."""
    if version is None:
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {json.loads(line)["run"]: line for line in lines}
