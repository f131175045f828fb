"""The header of a safetensors file: what it holds, without its data."""

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path

from hf_hyperconn.errors import UnsupportedCheckpointError

DENSEST = 2  # values in a byte, of all dtypes


@dataclass(frozen=True)
class TensorInfo:
    """dtype (as safetensors spells it), shape, size in bytes and file of one stored tensor."""

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    file: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def tensor_info(dtype: str, shape: list[int], data_offsets: tuple[int, int], file: str) -> TensorInfo:
    """The entry of a header as a `TensorInfo`.

    Raises `ValueError` when it contradicts itself.
    """
    start, end = data_offsets
    if not isinstance(dtype, str) or not all(isinstance(length, int) and length >= 0 for length in shape):
        raise ValueError(f"a tensor has dtype {dtype!r:.40} and shape {shape!r:.40}")
    if math.prod(shape) > DENSEST * (end - start):
        raise ValueError(f"a tensor of shape {shape!r:.40} has {end - start} bytes")
    return TensorInfo(dtype, tuple(shape), end - start, file)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors of a safetensors file.

    Raises `UnsupportedCheckpointError` when the file can't be read, is cut short or is not safetensors.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size - 8:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        end = 8 + length + max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if end != size:
            raise ValueError(f"it has {size} bytes, its header says {end}")
        return {
            name: tensor_info(entry["dtype"], entry["shape"], entry["data_offsets"], path.name)
            for name, entry in header.items()
        }
    except OSError as error:
        raise UnsupportedCheckpointError(f"can't read '{path}': {error.strerror}. Check its permissions.") from error
    except (struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnsupportedCheckpointError(
            f"{str(path)!r} is cut short or no safetensors file ({error}). Copy or download it again."
        ) from error
