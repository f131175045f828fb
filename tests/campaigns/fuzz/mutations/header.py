"""Mutations of safetensors files: their headers, and data that does not fit them."""

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path

from .values import DEEP, Mutation, Target, free, sparse, strange

DTYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "U8", "BOOL", "F8_E4M3", "F4", "C64", "E8M0", "F128", "", "f32")
NAMES = (
    *("model.layers.².mlp.up_proj.weight", "model.layers.99.mlp.up_proj.weight", "model.layers.-1.x", "layers.0."),
    *("\x1b[31mred\x1b[0m", "two\nlines", "a" * 100_000, "", "../outside", "lm_head.weight", "\u202eback", "\ud800"),
    *("model.layers.0.attn_hc.static_beta", "model.layers.١.x", "a.b.layers.0.c", f"model.layers.0{'0' * 5000}.x"),
)
LENGTHS = (0, 1, 2**31, 2**63, 2**64 - 1, 200 * 2**20)


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that are plain files and not too large to read."""
    found = sorted(path for path in folder.glob("*.safetensors") if path.is_file() and not path.is_symlink())
    return [path for path in found if path.stat().st_size < 2**24]


def _parts(path: Path) -> tuple[dict, bytes]:
    """Return the header of a safetensors file, and its data."""
    content = path.read_bytes()
    (length,) = struct.unpack("<Q", content[:8])
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def _write(path: Path, header: dict, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def of_headers(change: Callable[[dict, random.Random], str]) -> Mutation:
    """Return a mutation of a checkpoint from a change of one file's header."""

    def mutation(target: Target, pick: random.Random) -> str:
        path = pick.choice(weight_files(target.folder))
        header, data = _parts(path)
        said = change(header, pick)
        _write(path, header, data)
        return f"{path.name}: {said}"

    return mutation


def _tensor(header: dict, pick: random.Random) -> str:
    return pick.choice([name for name in header if name != "__metadata__"])


@of_headers
def offsets(header: dict, pick: random.Random) -> str:
    name, other = _tensor(header, pick), _tensor(header, pick)
    start, end = header[name]["data_offsets"]
    header[name]["data_offsets"] = pick.choice(
        [[0], [], [end, start], [-8, end], [start, end + 4], [start, end - 4], [start + 4, end + 4], [start] * 2]
        + [[start, 10**15], [float(start), float(end)], [str(start), str(end)], [None, None], {"a": 1}, "text"]
        + [header[other]["data_offsets"], [start, end, end], [True, end], None, [2**63, 2**64], [start, 10**30]]
    )
    return f"data_offsets of {name} = {header[name]['data_offsets']!r:.60}"


@of_headers
def dtype(header: dict, pick: random.Random) -> str:
    name = _tensor(header, pick)
    header[name]["dtype"] = pick.choice([*DTYPES, strange(pick)])
    return f"dtype of {name} = {header[name]['dtype']!r:.60}"


@of_headers
def shape(header: dict, pick: random.Random) -> str:
    name = _tensor(header, pick)
    now = header[name]["shape"]
    header[name]["shape"] = pick.choice(
        [now[::-1], [*now, 1], [1, *now], [], [-length for length in now], [2 * length for length in now], [0]]
        + [[True], [float(length) for length in now], [10**12, 10**12], [2**32, 2**32], None, "text", [[]]]
        + [[1] * 2000 + now, [strange(pick)], [length // 2 for length in now]]
    )
    return f"shape of {name} = {header[name]['shape']!r:.60}"


@of_headers
def names(header: dict, pick: random.Random) -> str:
    name, other = _tensor(header, pick), pick.choice(NAMES)
    match pick.randrange(4):
        case 0:
            del header[name]
            return f"{name} removed from the header"
        case 1:
            header[other] = header[name]
            return f"{name} twice, also as {other!r:.60}"
        case 2:
            header[other] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
            return f"an empty tensor {other!r:.60}"
        case _:
            header[other] = header.pop(name)
            return f"{name} renamed to {other!r:.60}"


def missing_tensor(target: Target, pick: random.Random) -> str:
    """A file that is valid, with a tensor less and its bytes gone."""
    path = pick.choice(weight_files(target.folder))
    header, data = _parts(path)
    gone = pick.choice([name for name in header if "norm" in name] or [_tensor(header, pick)])
    start, end = header.pop(gone)["data_offsets"]
    for name, entry in header.items():
        if name != "__metadata__" and entry["data_offsets"][0] >= end:
            entry["data_offsets"] = [offset - (end - start) for offset in entry["data_offsets"]]
    _write(path, header, data[:start] + data[end:])
    return f"{path.name}: {gone} is missing"


@of_headers
def anything(header: dict, pick: random.Random) -> str:
    name = pick.choice([*header, "__metadata__", "new"])
    header[name] = strange(pick)
    return f"{name} = {header[name]!r:.60}"


def length(target: Target, pick: random.Random) -> str:
    path = pick.choice(weight_files(target.folder))
    content = path.read_bytes()
    now = struct.unpack("<Q", content[:8])[0] if len(content) >= 8 else 0
    new = pick.choice([*LENGTHS, now + 1, max(now - 1, 0), len(content), len(content) - 8])
    path.write_bytes(struct.pack("<Q", max(new, 0)) + content[8:])
    return f"{path.name}: a header of {new} bytes"


def cut(target: Target, pick: random.Random) -> str:
    path = pick.choice(weight_files(target.folder))
    size = path.stat().st_size
    new = pick.choice([0, 7, 8, 9, size - 1, size - 4, size + 1, size + 4096, pick.randrange(size + 1)])
    with path.open("ab") as file:
        file.truncate(max(new, 0))
    return f"{path.name}: {new} bytes instead of {size}"


def garbage(target: Target, pick: random.Random) -> str:
    path = pick.choice(weight_files(target.folder))
    text = pick.choice(
        [b"", b"null", b"[]", b"3", b"{", b"[" * DEEP + b"]" * DEEP, b'{"a":' * DEEP, pick.randbytes(100), b'"text"']
        + [b"{}", b'{"__metadata__": {"format": "pt"}}', b'{"a": 1, "a": 2}', b"\xff" * 50, b"{" + b" " * 10**6 + b"}"]
    )
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    return f"{path.name}: its header is {text[:30]!r}"


def huge_header(target: Target, pick: random.Random) -> str:
    path = pick.choice(weight_files(target.folder))
    size = pick.choice([2_200_000_000, 120_000_000])
    sparse(path, size + 8)
    with path.open("r+b") as file:
        file.write(struct.pack("<Q", size))
    return f"{path.name}: a sparse header of {size} bytes"


def padded_header(target: Target, pick: random.Random) -> str:
    """Valid, but long."""
    path = pick.choice(weight_files(target.folder))
    content = path.read_bytes()
    (now,) = struct.unpack("<Q", content[:8])
    padding = pick.choice([8, 10**4, 2 * 10**7])
    path.write_bytes(struct.pack("<Q", now + padding) + content[8 : 8 + now] + b" " * padding + content[8 + now :])
    return f"{path.name}: {padding} spaces after its header"


def data(target: Target, pick: random.Random) -> str:
    """Values that are no numbers, or other ones."""
    path = pick.choice(weight_files(target.folder))
    content = bytearray(path.read_bytes())
    begin = 8 + struct.unpack("<Q", content[:8])[0]
    if begin >= len(content):
        return f"{path.name}: holds no data to change"
    kind = pick.choice(["NaN", "infinity", "another bit", "zeros"])
    place = begin + 4 * pick.randrange((len(content) - begin) // 4)
    match kind:
        case "NaN":
            content[place : place + 4] = struct.pack("<f", float("nan"))
        case "infinity":
            content[place : place + 4] = struct.pack("<f", float("inf"))
        case "another bit":
            content[place] ^= 1 << pick.randrange(8)
        case "zeros":
            content[begin:] = bytes(len(content) - begin)
    path.write_bytes(content)
    return f"{path.name}: {kind} in the data"


def swapped(target: Target, pick: random.Random) -> str:
    files = weight_files(target.folder)
    one, other = pick.choice(files), pick.choice(files)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)
    return f"{one.name} and {other.name} swapped"


@of_headers
def hc_metadata(header: dict, pick: random.Random) -> str:
    """Change the fields that `save_hc` writes into the metadata of its file."""
    saved = json.loads(header["__metadata__"]["hyper_connections"])
    name = pick.choice([*saved, "unknown", "hc_mult", "hc_mult", "model_type"])
    saved[name] = pick.choice([20_000, 10**9, strange(pick), strange(pick)])
    text = pick.choice([json.dumps(saved)] * 6 + ["[" * DEEP + "]" * DEEP, "null", "3", "{", "9" * 6000])
    header["__metadata__"]["hyper_connections"] = text
    return f"{name} = {saved[name]!r:.60} in its metadata, {text[:30]}"


def gone(target: Target, pick: random.Random) -> str:
    path = pick.choice(weight_files(target.folder))
    free(path).unlink()
    return f"{path.name} is missing"


ALL = (
    *(offsets, offsets, dtype, shape, shape, names, names, missing_tensor, anything, length, cut, garbage),
    *(huge_header, padded_header, data, data, swapped, gone),
)
