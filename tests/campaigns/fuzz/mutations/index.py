"""Mutations of the index of shards."""

import pickle
import random
from pathlib import Path

from .values import OPENED, Target, not_json, read_json, set_somewhere, sparse, strange, write_json

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
    """A pickle that leaves a trace when it is opened."""
    (target.folder / name).write_bytes(pickle.dumps(_Opened(target.outside / OPENED)))


def _read(target: Target) -> dict:
    path = target.folder / INDEX
    if path.is_file():
        return read_json(path)
    return {"metadata": {}, "weight_map": {"model.embed_tokens.weight": "model.safetensors"}}


def another_file(target: Target, pick: random.Random) -> str:
    index = _read(target)
    tensor = pick.choice(list(index["weight_map"]))
    index["weight_map"][tensor] = pick.choice(ELSEWHERE)
    write_json(target.folder / INDEX, index)
    return f"the index places {tensor} in {index['weight_map'][tensor]!r:.60}"


def a_pickle(target: Target, pick: random.Random) -> str:
    index, name = _read(target), pick.choice(PICKLES)
    write_pickle(target, name)
    tensors = list(index["weight_map"])
    for tensor in pick.choice([tensors, [pick.choice(tensors)]]):
        index["weight_map"][tensor] = name
    write_json(target.folder / INDEX, index)
    return f"the index names the pickle {name}"


def another_tensor(target: Target, pick: random.Random) -> str:
    index = _read(target)
    tensor = pick.choice(list(index["weight_map"]))
    file = index["weight_map"].pop(tensor)
    if pick.random() < 0.5:
        index["weight_map"][f"{tensor}²"] = file
    write_json(target.folder / INDEX, index)
    return f"the index does not name {tensor}"


def anything(target: Target, pick: random.Random) -> str:
    index = _read(target)
    said = set_somewhere(index, pick)
    write_json(target.folder / INDEX, index)
    return f"index: {said}"


def no_map(target: Target, pick: random.Random) -> str:
    index = {**_read(target), "weight_map": strange(pick)}
    write_json(target.folder / INDEX, index)
    return f"weight_map = {index['weight_map']!r:.60}"


def no_json(target: Target, pick: random.Random) -> str:
    return not_json(target.folder / INDEX, pick)


def huge(target: Target, pick: random.Random) -> str:
    sparse(target.folder / INDEX)
    return "the index is huge"


def gone(target: Target, pick: random.Random) -> str:
    (target.folder / INDEX).unlink(missing_ok=True)
    return "the index is missing"


ALL = (another_file, another_file, a_pickle, another_tensor, anything, no_map, no_json, huge, gone)
