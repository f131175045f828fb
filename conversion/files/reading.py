"""Reading of small files by others, and of the headers of safetensors files."""

import errno
import json
import math
import os
import re
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from hf_hyperconn.errors import UnsupportedCheckpointError

LARGEST_JSON = 50_000_000  # bytes; Python's values take up to 24 times as many
LARGEST_SIZE = 2**31  # of a model
HUGE = 2**63  # above every count and score
HALVES = re.compile(r"\\u[dD][89a-fA-F]")  # of characters, as escapes

# bits of one value, of all dtypes of safetensors
BITS = {
    **dict.fromkeys(("C64", "F64", "I64", "U64"), 64),
    **dict.fromkeys(("F32", "I32", "U32"), 32),
    **dict.fromkeys(("BF16", "F16", "I16", "U16"), 16),
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E4M3", "F8_E4M3FNUZ", "F8_E5M2", "F8_E5M2FNUZ", "F8_E8M0"), 8),
    **dict.fromkeys(("F6_E2M3", "F6_E3M2"), 6),
    "F4": 4,
}


def open_regular(path: str | Path) -> BinaryIO:
    """Open a regular file to read it, without waiting for a pipe or a device.

    Raises `OSError` when it can't be opened or is something else.
    """
    nonblocking = getattr(os, "O_NONBLOCK", 0)
    file = open(path, "rb", opener=lambda name, flags: os.open(name, flags | nonblocking))  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_text(path: str | Path, largest: int = LARGEST_JSON) -> str:
    """Return the text of a UTF-8 file, without a byte-order mark.

    largest: the largest accepted size in bytes.

    Raises `OSError` when it can't be read, is no regular file or is larger, and `ValueError` when it isn't UTF-8.
    """
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > largest:
            raise OSError(errno.EFBIG, f"it holds more than {largest:,} bytes", str(path))
        content = file.read(size)
    return content.decode("utf-8-sig")


def read_json(path: str | Path) -> Any:
    """Return the value in a JSON file.

    Raises `OSError` as `read_text` does. Raises `ValueError` when the text is not JSON, is nested too deeply, or has
    escapes for halves of characters.
    """
    text = read_text(path)
    try:
        content = json.loads(text)
        if HALVES.search(text):
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def finite(value: object) -> int | float | None:
    """Return a value that is a finite number; None for any other."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < HUGE:
        return value
    return None


def is_size(value: object) -> bool:
    """Tell whether a field of a config is a size that a model can have."""
    return _is_count(value) and 0 < value < LARGEST_SIZE


def _is_count(value: object) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


@dataclass(frozen=True)
class TensorInfo:
    """A stored tensor: dtype (as safetensors spells it), shape, size in bytes and file."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str

    @property
    def size(self) -> int:
        """Count the elements."""
        return math.prod(self.shape)


def tensor_info(dtype: str, shape: list[int], file: str) -> TensorInfo:
    """Return the entry of a header as a `TensorInfo`.

    Raises `ValueError` for an unknown dtype or an impossible shape.
    """
    if not isinstance(dtype, str) or dtype not in BITS:
        raise ValueError(f"a tensor has dtype {dtype!r:.40}")
    if not isinstance(shape, list | tuple) or not all(_is_count(length) for length in shape):
        raise ValueError(f"a tensor has shape {shape!r:.40}")
    return TensorInfo(dtype, tuple(shape), math.prod(shape) * BITS[dtype] // 8, file)


def check_offsets(tensors: Mapping[str, TensorInfo], offsets: Mapping[str, tuple[int, int]], size: int) -> None:
    """Require that tensors of the sizes of their shapes lie one after the other within `size` bytes.

    Raises `ValueError` when they do not.
    """
    if not all(len(pair) == 2 and all(map(_is_count, pair)) for pair in offsets.values()):
        raise ValueError("where a tensor lies is not a pair of numbers")
    end = 0
    for name, (start, stop) in sorted(offsets.items(), key=lambda item: item[1]):
        if start != end or stop - start != tensors[name].nbytes:
            raise ValueError(f"a tensor of {tensors[name].nbytes} bytes lies from {start} to {stop}, after {end}")
        end = stop
    if end > size:
        raise ValueError(f"its tensors take {end} bytes, and it has {size}")


def read_header(path: Path) -> dict[str, TensorInfo]:
    """Return the tensors of a safetensors file, which safetensors itself checks.

    Raises `UnsupportedCheckpointError` when the file can't be read, is cut short or is not safetensors.
    """
    from safetensors import SafetensorError, safe_open

    try:
        open_regular(path).close()
        with safe_open(path, framework="numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
            return {name: tensor_info(part.get_dtype(), part.get_shape(), path.name) for name, part in slices.items()}
    except OSError as error:
        raise UnsupportedCheckpointError(f"can't read '{path}': {error.strerror}. Check its permissions.") from error
    except (SafetensorError, ValueError) as error:
        raise UnsupportedCheckpointError(
            f"{str(path)!r} is cut short or not a safetensors file ({error}). Copy or download it again."
        ) from error
