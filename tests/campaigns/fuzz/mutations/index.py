"""Mutations of the index of shards."""

import pickle
import random
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .values import OPENED, Target, edited, set_somewhere, spoiled, strange, write_json

INDEX = "model.safetensors.index.json"
ELSEWHERE = (
    *("../outside/secret.txt", "/etc/passwd", "assets/../../outside/secret.txt", "assets/words.txt", "config.json"),
    *("", ".", "..", "\x00", "missing.safetensors", "README.md", "..\\secret", "a" * 300, "\x1b[31m.safetensors"),
)
PICKLES = ("pytorch_model.bin", "model.pt", "model.pickle", "model.safetensors.bin")


class _Opened:
    """Once unpickled, a file lies at the path."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def write_pickle(target: Target, name: str) -> None:
    """Write a pickle that leaves a trace when it is opened."""
    (target.folder / name).write_bytes(pickle.dumps(_Opened(target.outside / OPENED)))


@contextmanager
def _edited(target: Target) -> Iterator[dict]:
    """The index of a checkpoint, or one of a tensor where there is none, which is written back."""
    if not (target.folder / INDEX).is_file():
        weight_map = {"model.embed_tokens.weight": "model.safetensors"}
        write_json(target.folder / INDEX, {"metadata": {}, "weight_map": weight_map})
    with edited(target.folder / INDEX) as index:
        yield index


def another_file(target: Target, pick: random.Random) -> str:
    with _edited(target) as index:
        tensor, file = pick.choice(list(index["weight_map"])), pick.choice(ELSEWHERE)
        index["weight_map"][tensor] = file
    return f"the index places {tensor} in {file!r:.60}"


def a_pickle(target: Target, pick: random.Random) -> str:
    name = pick.choice(PICKLES)
    write_pickle(target, name)
    with _edited(target) as index:
        tensors = list(index["weight_map"])
        index["weight_map"] |= dict.fromkeys(pick.choice([tensors, [pick.choice(tensors)]]), name)
    return f"the index names the pickle {name}"


def another_tensor(target: Target, pick: random.Random) -> str:
    with _edited(target) as index:
        tensor = pick.choice(list(index["weight_map"]))
        file = index["weight_map"].pop(tensor)
        if pick.random() < 0.5:
            index["weight_map"][f"{tensor}²"] = file
    return f"the index does not name {tensor}"


def anything(target: Target, pick: random.Random) -> str:
    with _edited(target) as index:
        return f"index: {set_somewhere(index, pick)}"


def no_map(target: Target, pick: random.Random) -> str:
    with _edited(target) as index:
        index["weight_map"] = strange(pick)
    return f"weight_map = {index['weight_map']!r:.60}"


ALL = (another_file, another_file, a_pickle, another_tensor, anything, no_map, *spoiled(INDEX))
