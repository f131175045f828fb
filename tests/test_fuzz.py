"""The harness of tests/campaigns/fuzz finds what is planted, and docs/reliability.md says what was found last."""

import json
import subprocess
import sys

import pytest

from .campaigns import reliability
from .pages import REPOSITORY

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


@pytest.mark.slow
def test_planted_defects_are_found():
    """Each in a command line that is otherwise the real one, which passes."""
    command = [sys.executable, "-m", "tests.campaigns.fuzz.planted"]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found.pop("convert: faithful") == ["ok", ""]
    assert found.pop("push: faithful") == ["ok", ""]
    assert "published 'notes.txt'" in found.pop("push: published")[1]
    assert found.keys() == {f"convert: {name}" for name in PLANTED}
    for name, reason in PLANTED.items():
        outcome, said = found[f"convert: {name}"]
        assert outcome == reliability.FAILED
        assert reason in said


def test_the_page_has_the_last_figures():
    assert reliability.FIGURES.rendered() == reliability.FIGURES.written()
