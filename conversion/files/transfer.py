"""Bringing weight files to the output, byte for byte."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from hf_hyperconn.errors import ConversionError, VerificationError

from .writing import opened_to_copy

CHUNK = 2**20
COPIED_AT_ONCE = 2**26

FICLONE = 0x40049409  # Linux: share the extents of another file, on file systems that can


def bring(source: Path, target: Path, link: str, progress: Callable[[int], None]) -> None:
    """Make `target` hold the bytes of `source`; it appears under its name only when complete.

    link: "copy" (sharing extents where the file system can), "hard" or "symlink".
    progress: called with each number of bytes done.

    Raises `ConversionError` when the file system refuses.
    """
    if target.exists() and _is_of(source, target):
        progress(source.stat().st_size)
        return
    part = target.with_name(target.name + ".part")
    part.unlink(missing_ok=True)
    try:
        if link == "hard":
            os.link(source, part)
        elif link == "symlink":
            os.symlink(source, part)
        else:
            _copy(source, part, progress)
        part.replace(target)
    except OSError as error:
        advice = "Use --link copy." if link != "copy" else "Free some space or choose another OUT."
        raise ConversionError(f"can't bring '{source}' to '{target.parent}': {error.strerror}. {advice}") from error


def compare(source: Path, target: Path, progress: Callable[[int], None] = lambda count: None) -> str:
    """Read two files side by side and return their common SHA-256; a file and a link to it are read once.

    Raises `VerificationError` when they differ.
    """
    if os.path.samefile(source, target):
        return digest(source, progress)
    if source.stat().st_size != target.stat().st_size:
        raise VerificationError(f"'{target}' and '{source}' differ in size.")
    found, here, there = hashlib.sha256(), bytearray(CHUNK), bytearray(CHUNK)
    with open(source, "rb") as a, open(target, "rb") as b:
        while count := a.readinto(here):
            if b.readinto(there) != count or not _equal(here, there, count):
                raise VerificationError(f"'{target}' differs from '{source}'.")
            found.update(memoryview(here)[:count])
            progress(count)
    return found.hexdigest()


def digest(path: Path, progress: Callable[[int], None] = lambda count: None) -> str:
    """The SHA-256 of a file."""
    found, chunk = hashlib.sha256(), bytearray(CHUNK)
    with open(path, "rb") as file:
        while count := file.readinto(chunk):
            found.update(memoryview(chunk)[:count])
            progress(count)
    return found.hexdigest()


def _equal(here: bytearray, there: bytearray, count: int) -> bool:
    """Whether the first `count` bytes are equal; whole buffers are compared without copying them."""
    return here == there if count == len(here) else here[:count] == there[:count]


def _is_of(source: Path, target: Path) -> bool:
    """Whether what an earlier attempt brought is still what the source holds."""
    try:
        compare(source, target)
    except VerificationError:
        return False
    return True


def copy_anew(source: Path, target: Path) -> None:
    """Copy a file, in place of what has the name `target`. Raises `OSError`, also when `source` is no regular file."""
    if os.path.lexists(target):
        target.unlink()
    with opened_to_copy(source, target) as (a, b):
        _copy_all(a.fileno(), b.fileno())


def _copy(source: Path, target: Path, progress: Callable[[int], None]) -> None:
    with opened_to_copy(source, target) as (a, b):
        _copy_all(a.fileno(), b.fileno(), progress)


def _copy_all(source: int, target: int, progress: Callable[[int], None] = lambda count: None) -> None:
    """Copy what an open file holds to another."""
    size, done = os.fstat(source).st_size, 0
    if _reflink(source, target):
        progress(size)
        return
    while count := _copy_some(source, target, done):
        done += count
        progress(count)
    if done != size:
        raise OSError(0, f"only {done} of {size} bytes could be read")


def _copy_some(source: int, target: int, offset: int) -> int:
    """Copy the next bytes between two open files, by the kernel where it can, and return how many."""
    try:
        return os.copy_file_range(source, target, COPIED_AT_ONCE, offset, offset)
    except (AttributeError, OSError):  # not Linux, or not between these file systems
        os.lseek(source, offset, os.SEEK_SET)
        os.lseek(target, offset, os.SEEK_SET)
        data = memoryview(os.read(source, CHUNK))
        count = len(data)
        while data:
            data = data[os.write(target, data) :]
        return count


def _reflink(source: int, target: int) -> bool:
    try:
        from fcntl import ioctl

        ioctl(target, FICLONE, source)
    except (ImportError, OSError):
        return False
    return True
