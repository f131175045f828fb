"""Run a script as it is, and then see that it has left no thread of gloo, which may abort if it outlives Python.

A script that hangs ends with what every thread of it was doing.

Usage: torchrun ... tests/ranks/to_the_end.py SCRIPT [ARGUMENT ...]
"""

import faulthandler
import runpy
import sys
import time
from contextlib import suppress
from pathlib import Path


def threads(word: str) -> list[str]:
    """Return the names of this process's threads that contain a word."""
    names = []
    for task in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            names.append(task.joinpath("comm").read_text().strip())
    return [name for name in names if word in name]


faulthandler.dump_traceback_later(240, exit=True)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")

deadline = time.monotonic() + 10  # a thread that was joined may be listed a little longer
while left := threads("gloo"):
    if time.monotonic() > deadline:
        sys.exit(f"left behind: {left}")
    time.sleep(0.01)
