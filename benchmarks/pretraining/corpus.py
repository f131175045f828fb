"""Text that every machine with Python and this package's dependencies has: their source code. A token is a byte.

Files are split, not text: which part a file is in follows from the hash of its content, so equal files are never on
both sides, and another version of one file moves no other.
"""

import hashlib
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import torch

HELD_OUT = 50  # one file in so many
LARGEST = 200_000  # bytes; larger files are tables


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on and bytes held out, `[T]`, and what identifies them.

    sha256: of all hashes of files, in their order.
    """

    training: torch.Tensor
    held_out: torch.Tensor
    files: int
    sha256: str

    def describe(self) -> dict:
        """What results record of the text they were obtained on."""
        return {
            "files": self.files,
            "training_bytes": len(self.training),
            "held_out_bytes": len(self.held_out),
            "sha256": self.sha256,
        }


@cache
def corpus(name: str) -> Corpus:
    """`"python"`: the source of the standard library, PyTorch and Transformers; `"headers"`: PyTorch's C++ headers."""
    return _read(_python_files() if name == "python" else (_package("torch") / "include").rglob("*.h"))


def _read(paths: Iterator[Path]) -> Corpus:
    contents = {}
    for path in paths:
        if path.stat().st_size <= LARGEST and (content := path.read_bytes()):
            contents[hashlib.sha256(content).digest()] = content
    order = sorted(contents)
    parts = ([], [])
    for digest in order:
        parts[int.from_bytes(digest[-4:], "big") % HELD_OUT == 0].append(contents[digest])
    training, held_out = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return Corpus(training, held_out, len(order), hashlib.sha256(b"".join(order)).hexdigest())


def _python_files() -> Iterator[Path]:
    library = Path(sysconfig.get_path("stdlib"))
    for path in library.rglob("*.py"):
        if not {"site-packages", "dist-packages"} & set(path.relative_to(library).parts):
            yield path
    for name in ("torch", "transformers"):
        yield from _package(name).rglob("*.py")


def _package(name: str) -> Path:
    return Path(find_spec(name).origin).parent


def rows(text: torch.Tensor, length: int) -> torch.Tensor:
    """Return the text cut into rows of token ids, `[R, S]` uint8; what is left over at the end is dropped."""
    return text[: len(text) // length * length].view(-1, length)
