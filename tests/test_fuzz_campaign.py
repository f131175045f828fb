"""Some of the cases of `make fuzz`."""

import os
import subprocess
import sys

import pytest

from .pages import REPOSITORY

SEED = os.environ.get("HF_HYPERCONN_FUZZ_SEED", "0")


@pytest.mark.slow
def test_mutated_checkpoints():
    command = [sys.executable, "-m", "tests.campaigns.fuzz", "--cases", "100", "--seed", SEED, "--workers", "1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
