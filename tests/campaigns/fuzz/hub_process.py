"""The stand-in for the Hub in a process of its own, which lives on when who pushes is killed."""

import json
import os
import signal
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from tests.push.conftest import TOKENS
from tests.writable_hub import WritableHub


class Running(NamedTuple):
    """A Hub that serves: where it is, and how it is asked what it holds."""

    url: str
    asking: int
    answers: int

    def repos(self) -> dict[str, dict[str, Path]]:
        """Return the folder of every branch of every repo."""
        os.write(self.asking, b"?")
        return {
            repo: {branch: Path(folder) for branch, folder in branches.items()}
            for repo, branches in json.loads(_line(self.answers)).items()
        }


@contextmanager
def hub_process(place: Path, repos: dict[str, Path]):
    """A Hub that holds some folders as repos, and keeps what it is given in `place`."""
    questions, asking = os.pipe()
    answers, answering = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if not (child := os.fork()):
        os.close(asking)
        _serve(place, repos, questions, answering)
    os.close(questions)
    os.close(answering)
    try:
        yield Running(_line(answers), asking, answers)
    finally:
        os.close(asking)
        os.close(answers)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _serve(place: Path, repos: dict[str, Path], questions: int, answering: int) -> None:
    """Answer until nobody asks any more."""
    try:
        os.setsid()
        with WritableHub(place, TOKENS) as hub:
            for repo, folder in repos.items():
                hub.push(repo, folder)
            os.write(answering, f"{hub.url}\n".encode())
            while os.read(questions, 1):
                held = {
                    repo: {branch: str(commits[commit]) for branch, commit in hub.refs(repo).items()}
                    for repo, commits in list(hub._commits.items())
                }
                os.write(answering, f"{json.dumps(held)}\n".encode())
    finally:
        os._exit(0)


def _line(descriptor: int) -> str:
    line = b""
    while not line.endswith(b"\n"):
        if not (read := os.read(descriptor, 65536)):
            raise RuntimeError("the stand-in for the Hub has ended")
        line += read
    return line.decode().rstrip("\n")
