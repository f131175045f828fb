"""Doing what a page of docs/ says, in a copy of the repository."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

# the path of the file that a block makes or changes, where it stands before it; language; text
BLOCKS = re.compile(r"(?:^`([\w./]+)`:\n\n)?^```(\w+)\n(.*?)^```", re.M | re.S)
NOT_SOURCE = (".git", ".venv", "build", "dist", "*.egg-info", "*.pyi", "__pycache__", ".pytest_cache", ".ruff_cache")


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
    """Return the text with the change of a block, whose lines begin with a space, `-` or `+`."""
    lines = diff.splitlines(keepends=True)
    before = "".join(line[1:] for line in lines if not line.startswith("+"))
    after = "".join(line[1:] for line in lines if not line.startswith("-"))
    assert text.count(before) == 1, f"does not stand there once:\n{before}"
    return text.replace(before, after)


def run(command: list[str], place: Path) -> subprocess.CompletedProcess:
    """Run a command of the page in the copy."""
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
