"""State of a training run that is kept every few minutes, so that the run goes on from there."""

import time
from collections.abc import Callable, Iterable, Mapping
from io import BytesIO
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import device
from hf_hyperconn.conversion.files.writing import replace_file

KEEP_EVERY = 120  # seconds


class OutOfTime(Exception):
    """The run was kept; another call goes on with it."""


class Kept:
    """The file of an unfinished run.

    parts: model, optimizer and schedule by name.
    deadline: of `time.monotonic`.
    text: a digest of what the run is trained on.
    """

    def __init__(self, path: Path, parts: Mapping[str, Any], deadline: float, text: str | None = None):
        self.path, self.parts, self.deadline, self.text = path, parts, deadline, text
        self.last_kept = time.monotonic()

    def load(self) -> dict | None:
        """Give the parts their state, and return that of the loop; None when the run has not begun.

        Raises `RuntimeError` for a run on another text.
        """
        if not self.path.exists():
            return None
        saved = torch.load(self.path, map_location=device(), weights_only=True)
        if saved.get("text") != self.text:
            raise RuntimeError(f"{self.path} is of another text. Give that, or remove the file.")
        for name, part in self.parts.items():
            part.load_state_dict(saved[name])
        return saved["state"]

    def keep(self, state: dict) -> None:
        """Write the state when it is time to.

        Raises `OutOfTime` when the deadline has passed.
        """
        now = time.monotonic()
        if now <= min(self.deadline, self.last_kept + KEEP_EVERY):
            return
        states = {name: part.state_dict() for name, part in self.parts.items()}
        content = BytesIO()
        torch.save({**states, "state": state, "text": self.text}, content)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(self.path, content.getvalue())
        self.last_kept = now
        if now > self.deadline:
            raise OutOfTime(self.path.stem)


def train_all(runs: Iterable[tuple[str, Callable[[], dict]]], seconds: str = "seconds_a_step") -> None:
    """Train one run after the other, and print their results, until one is out of time.

    runs: the name of each, and the call that trains it.
    seconds: the field of a result with the time of a step.
    """
    for name, train in runs:
        try:
            result = train()
        except OutOfTime:
            print(f"{name}: interrupted; the same command goes on", flush=True)
            return
        print(f"{name}: {result['held_out_loss']:.4f}, {result[seconds]:.3f} s a step", flush=True)
