"""Run a program on ranks, and end without Python's shutdown.

PyTorch's caches own process groups to the end. A thread of gloo that waits for Python there may abort the rank.

Usage: torchrun ... tests/ranks/without_shutdown.py PROGRAM ...
"""

import os
import runpy
import sys

if "HF_MODULES_CACHE" in os.environ:  # into which Transformers copies a folder's code without a lock
    os.environ["HF_MODULES_CACHE"] += f"/rank {os.environ['RANK']}"
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
sys.stdout.flush()
os._exit(0)
