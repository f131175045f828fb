"""docs/adding_a_family.md, followed: its blocks make the family, and its commands prove it."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hf_hyperconn.families import FAMILIES

from .pages import REPOSITORY, read

PAGE = read("docs/adding_a_family.md")
# the path of the file that a block makes or changes, where it stands before it; language; text
BLOCKS = re.compile(r"(?:^`([\w./]+)`:\n\n)?^```(\w+)\n(.*?)^```", re.M | re.S)
NOT_SOURCE = (".git", ".venv", "build", "dist", "*.egg-info", "__pycache__", ".pytest_cache", ".ruff_cache")


def follow(page: str, place: Path) -> list[list[str]]:
    """Do what the page says to a copy of the repository; returns its commands, the first block's among them."""
    commands = []
    for name, language, code in BLOCKS.findall(page):
        if language == "bash":
            commands += [shlex.split(line) for line in code.splitlines()]
        elif language == "diff":
            (place / name).write_text(changed((place / name).read_text(encoding="utf-8"), code), encoding="utf-8")
        elif name:
            assert not (place / name).exists()
            (place / name).write_text(code, encoding="utf-8")
        else:
            commands.append(["python", "-c", code])
    return commands


def changed(text: str, diff: str) -> str:
    """The text with the change of a block, whose lines begin with a space, `-` or `+`."""
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if not line.startswith("+"))
    after = "".join(line[1:] for line in lines if not line.startswith("-"))
    assert text.count(before) == 1, f"does not stand there once:\n{before}"
    return text.replace(before, after)


def run(command: list[str], place: Path) -> subprocess.CompletedProcess:
    """A command of the page, in the copy."""
    assert command[0] == "python"
    environment = {**os.environ, "PYTHONPATH": str(place), "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(
        [sys.executable, *command[1:]],
        cwd=place,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def place(tmp_path) -> Path:
    """A copy of the repository."""
    return shutil.copytree(REPOSITORY, tmp_path / "main", ignore=shutil.ignore_patterns(*NOT_SOURCE))


def test_the_blocks_apply_and_pass_the_linter(place):
    model_type = re.search(r'base_model_type = "(\w+)"', PAGE)[1]
    assert model_type not in FAMILIES
    commands = follow(PAGE, place)
    assert [command[:3] for command in commands[1:]] == [["python", "-m", "tests.record"], ["python", "-m", "pytest"]]
    for options in (["check"], ["format", "--check"]):
        done = run(["python", "-m", "ruff", *options, "."], place)
        assert done.returncode == 0, done.stdout
    with pytest.raises(AssertionError, match="does not stand there once"):
        follow(re.sub(r"(?s)```python\n.*?```", "", PAGE), place)  # the second time


@pytest.mark.slow
def test_the_commands_prove_the_family(place):
    golden = place / "tests" / "golden" / "weight_decay.json"
    before = json.loads(golden.read_text(encoding="utf-8"))["families"]
    for command in follow(PAGE, place):
        done = run(command, place)
        assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 30
    now = json.loads(golden.read_text(encoding="utf-8"))["families"]
    assert {name: now[name] for name in before} == before
    assert len(now) == len(before) + 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "test"),
    [
        (
            '    """An Arcee decoder layer on residual streams."""\n',
            "\n    def mlp_branch(self, hidden_states):\n        return self.mlp(hidden_states)\n",
            "test_every_class_equals_its_base",
        ),
        ('"arcee", ALL_HEADS', '"arcee", CLASSIFIERS', "test_the_table_of_families_agrees_with_the_classes"),
        ('"arcee", ALL_HEADS', '"arcee", ALL_HEADS, norm={"weight": 0.0}', "test_the_coefficients_are_predicted"),
    ],
    ids=["branch", "heads", "norm"],
)
def test_the_commands_find_a_wrong_block(right, wrong, test, place):
    assert PAGE.count(right) == 1
    *_, proof = follow(PAGE.replace(right, wrong), place)
    proof[proof.index("-k") + 1] = f"arcee and {test}"  # one of those that the page selects
    done = run(proof, place)
    assert done.returncode == 1, done.stdout
    assert re.search(rf"FAILED .*::{test}", done.stdout), done.stdout
