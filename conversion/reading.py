"""Reading small files that somebody else wrote: regular ones alone, and no more of them than they may hold."""

import errno
import json
import os
import re
import stat
from pathlib import Path
from typing import Any, BinaryIO

LARGEST = 50_000_000  # bytes; of JSON, Python's values take up to 24 times as many
LARGEST_SIZE = 2**31  # that a model has
HUGE = 2**63  # what no count and no score comes to
HALVES = re.compile(r"\\u[dD][89a-fA-F]")


def open_regular(path: str | Path) -> BinaryIO:
    """A regular file, open to be read. Neither a pipe nor a device is waited for.

    Raises `OSError` when it can't be opened or is something else.
    """
    file = open(path, "rb", opener=_without_waiting)  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))
    return file


def read_text(path: str | Path, largest: int = LARGEST) -> str:
    """The text of a file in UTF-8, without a mark of its byte order.

    largest: how many bytes it may hold.

    Raises `OSError` when it can't be read, is no regular file or holds more, and `ValueError` when it is no such text.
    """
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > largest:
            raise OSError(errno.EFBIG, f"it holds more than {largest:,} bytes", str(path))
        content = file.read(size)
    return content.decode("utf-8-sig")


def read_json(path: str | Path, largest: int = LARGEST) -> Any:
    """What a file of JSON holds; arguments and `OSError` as for `read_text`.

    Raises `ValueError` when it is not JSON, nested deeper than can be read, or escapes stand for halves of characters.
    """
    text = read_text(path, largest)
    try:
        content = json.loads(text)
        if HALVES.search(text):
            json.dumps(content, ensure_ascii=False).encode()
        return content
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def finite(value: object) -> int | float | None:
    """A value that is a number and can be written as one, or None."""
    if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < HUGE:
        return value
    return None


def _without_waiting(path: str, flags: int) -> int:
    return os.open(path, flags | getattr(os, "O_NONBLOCK", 0))


def is_size(value: object) -> bool:
    """Whether a field of a config holds a size that a model can have."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < LARGEST_SIZE
