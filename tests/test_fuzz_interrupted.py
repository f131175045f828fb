"""Some of the signals and full disks of `make fuzz`."""

import os
import subprocess
import sys

import pytest

from .pages import REPOSITORY

SEED = os.environ.get("HF_HYPERCONN_FUZZ_SEED", "0")
NOT_ALLOWED = 77


def run(*arguments: str) -> None:
    command = [sys.executable, "-m", *arguments, "--workers", "1"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode == NOT_ALLOWED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"


@pytest.mark.slow
def test_signals():
    run("tests.campaigns.fuzz.signals", "--count", "12", "--seed", SEED)


@pytest.mark.slow
def test_full_disks():
    run("tests.campaigns.fuzz.disks", "--step", "36")
