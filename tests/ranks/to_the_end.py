"""Run a script as it is, and then see that it has left no thread of gloo, which may abort if it outlives Python.

A script that hangs ends with what every thread of it was doing.

Usage: torchrun ... tests/ranks/to_the_end.py SCRIPT [ARGUMENT ...]
"""

import faulthandler
import runpy
import sys
from pathlib import Path

faulthandler.dump_traceback_later(240, exit=True)
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
threads = [task.joinpath("comm").read_text().strip() for task in Path("/proc/self/task").glob("*")]
if left := [name for name in threads if "gloo" in name]:
    sys.exit(f"left behind: {left}")
