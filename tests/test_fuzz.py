"""Some of the cases, signals and full disks of `make fuzz`; and its harness finds planted defects."""

import json
import os
import subprocess
import sys

import pytest

from .campaigns.reliability import FAILED
from .pages import REPOSITORY

pytestmark = pytest.mark.slow

SEED = os.environ.get("HF_HYPERCONN_FUZZ_SEED", "0")
NOT_ALLOWED = 77
PLANTED = {
    "half_an_out": "'work/out' is new (exit code 1)",
    "out_without_a_shard": "OUT lacks model-00001-of-00002.safetensors",
    "other_weights": "model-00001-of-00002.safetensors is not what the base has",
    "other_config": "its logits are not the base's",
    "changed_source": "'work/base/config.json' is changed",
    "lost_file": "a file of the user's is gone",
    "leak": "'notes.txt' holds what lies outside of the base",
    "written_elsewhere": "'outside/more.txt' is new",
    "hangs": "killed after 4 seconds",
    "hog": "too much memory: MemoryError",
    "raises": "traceback: ValueError: nobody foresaw it",
    "unforeseen": "unexpected: error: 'x'",
    "escape": "prints the control character '\\x1b'",
    "silent": "exit code 1, and 0 lines of error",
    "killed": "ended by signal 11",
}


def run(module: str, *arguments: str) -> str:
    """Return what a program of the harness prints; skip the test where the machine doesn't allow it."""
    command = [sys.executable, "-m", f"tests.campaigns.{module}", *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode == NOT_ALLOWED:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr[-2000:]}"
    return done.stdout


def test_planted_defects_are_found():
    """Each in a command line that is otherwise the real one, which passes."""
    found = json.loads(run("fuzz.planted").splitlines()[-1])
    assert found.pop("convert: faithful") == ["ok", ""]
    assert found.pop("push: faithful") == ["ok", ""]
    assert "published 'notes.txt'" in found.pop("push: published")[1]
    assert found.keys() == {f"convert: {name}" for name in PLANTED}
    for name, reason in PLANTED.items():
        outcome, said = found[f"convert: {name}"]
        assert outcome == FAILED
        assert reason in said


@pytest.mark.parametrize(
    "arguments",
    [
        ("fuzz", "--cases", "100", "--seed", SEED),
        ("fuzz.signals", "--count", "12", "--seed", SEED),
        ("fuzz.disks", "--step", "36"),
    ],
    ids=["mutated checkpoints", "signals", "full disks"],
)
def test_no_promise_is_broken(arguments):
    run(*arguments, "--workers", "1")
