"""Values and texts that nobody expects, and how JSON files come to hold them."""

import json
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

HUGE = 3 * 2**30  # bytes of a sparse file
DEEP = 100_000
# of files that no command may let out of where they are, or send to the Hub
SECRET, PRIVATE = b"SECRET that lies outside", b"PRIVATE to who trained it"
PRECIOUS = b"PRECIOUS to its user, and never a command's to remove"
OPENED = "opened"  # a file that appears beside the secret when a pickle or foreign code is run

STRANGE = (
    *(None, True, False, -1, 0, 1, 2, 3, 5, 16, 2**31, 10**8, 10**18, 10**30, -0.0, 1.5, 1e300),
    *(float("nan"), float("inf"), "", "4", "²", "none", "float16", "a" * 5000, "\x1b[31mred\x1b[0m", "two\nlines"),
    *("\u202eback", "../outside/secret.txt", "/etc/passwd", "\x00", [], {}, [1], [None], {"a": 1}, [[[[]]]], "\ud800"),
)


@dataclass(frozen=True)
class Target:
    """What is mutated: a checkpoint's folder, and a folder outside of it with a secret."""

    folder: Path
    outside: Path


Mutation = Callable[[Target, random.Random], str]  # returns what it did, for people


def strange(pick: random.Random):
    """Return some value of JSON."""
    return pick.choice(STRANGE)


def read_json(path: Path) -> dict:
    return json.loads(read(path))


def read(path: Path) -> bytes:
    """Return the content of a plain file, and nothing of what another mutation has put in its place."""
    return path.read_bytes() if path.is_file() and path.stat().st_size < 2**24 else b""


def write_json(path: Path, content) -> None:
    free(path).write_text(json.dumps(content), encoding="utf-8")


@contextmanager
def edited(path: Path) -> Iterator[dict]:
    """The content of a JSON file, which is written back."""
    content = read_json(path)
    yield content
    write_json(path, content)


def spoiled(name: str) -> tuple[Mutation, ...]:
    """Return mutations that make a JSON file of a checkpoint another kind of file, huge or missing."""

    def no_json(target: Target, pick: random.Random) -> str:
        return not_json(target.folder / name, pick)

    def huge(target: Target, pick: random.Random) -> str:
        sparse(target.folder / name)
        return f"{name} is huge"

    def gone(target: Target, pick: random.Random) -> str:
        (target.folder / name).unlink()
        return f"{name} is missing"

    return no_json, huge, gone


def free(path: Path) -> Path:
    """Make room for a plain file at a path, and return the path."""
    if path.is_symlink() or (path.exists() and not path.is_file()):
        remove(path)
    return path


def remove(path: Path) -> None:
    """Remove a file or a folder, if there is one."""
    if path.is_dir() and not path.is_symlink():
        for entry in path.iterdir():
            remove(entry)
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def sparse(path: Path, size: int = HUGE) -> None:
    """Make a file as long as `size`, which takes no space."""
    with free(path).open("ab") as file:
        os.truncate(file.fileno(), size)


def set_somewhere(content, pick: random.Random) -> str:
    """Change, rename or remove one value of a JSON object or array, at any depth. Returns where."""
    where = []
    while True:
        keys = list(content) if isinstance(content, dict) else list(range(len(content)))
        key = pick.choice(keys)
        where.append(str(key))
        inner = content[key]
        if not (isinstance(inner, dict | list) and inner and pick.random() < 0.8):
            break
        content = inner
    place = ".".join(where)
    match pick.randrange(5):
        case 0:
            del content[key]
            return f"{place} removed"
        case 1 if isinstance(content, dict):
            content[str(strange(pick))] = content.pop(key)
            return f"{place} renamed"
        case _:
            content[key] = strange(pick)
            return f"{place} = {content[key]!r:.60}"


def not_json(path: Path, pick: random.Random) -> str:
    """Make a file no JSON, or JSON of a kind that costs."""
    text = read(path) or b"{}"
    inside = text.strip().removeprefix(b"{")
    kinds = {
        "empty": b"",
        "with a byte order mark": b"\xef\xbb\xbf" + text,
        "UTF-16": text.decode(errors="replace").encode("utf-16"),
        "not UTF-8": text[:-1] + b"\xff\xfe}",
        "cut short": text[: pick.randrange(len(text) + 1)],
        "random bytes": pick.randbytes(200),
        "an array": b"[" + text + b"]",
        "a number": b"1" * 6000,
        "a text": b'"text"',
        "null": b"null",
        "nested deep in arrays": b"[" * DEEP + b"]" * DEEP,
        "nested deep in objects": b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        "nested deep in a field": b'{"deep": ' + b"[" * DEEP + b"]" * DEEP + b", " + inside,
        "with a long number": b'{"number": ' + b"9" * 6000 + b", " + inside,
        "with a key twice": b'{"model_type": "bert", "weight_map": 3, ' + inside,
        "followed by more": text + text,
        "with a million keys": b"{" + b",".join(b'"k%d":0' % i for i in range(10**5)) + b", " + inside,
    }
    kind = pick.choice(list(kinds))
    free(path).write_bytes(kinds[kind])
    return f"{path.name} is {kind}"
