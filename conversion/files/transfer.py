"""Copying, linking and comparing of files, byte for byte."""

import hashlib
import os
from collections.abc import Callable
from pathlib import Path

from hf_hyperconn.errors import ConversionError, VerificationError

from .writing import opened_to_copy

CHUNK = 2**20
COPIED_AT_ONCE = 2**26

FICLONE = 0x40049409  # Linux: share the extents of another file, on file systems that can

Progress = Callable[[int], None]  # called with each number of bytes done


def _ignore(count: int) -> None:
    pass


def bring(source: Path, target: Path, link: str, progress: Progress) -> None:
    """Make `target` hold the bytes of `source`; it appears under its name only when complete.

    link: "copy" (sharing extents where the file system can), "hard" or "symlink".

    Raises `ConversionError` when the file system refuses.
    """
    if target.exists() and _are_equal(source, target):
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


def compare(source: Path, target: Path, progress: Progress = _ignore) -> str:
    """Read two files side by side and return their common SHA-256; a file and a link to it are read once.

    Raises `VerificationError` when they differ.
    """
    if os.path.samefile(source, target):
        return digest(source, progress)
    if source.stat().st_size != target.stat().st_size:
        raise VerificationError(f"'{target}' and '{source}' differ in size.")
    sha256 = hashlib.sha256()
    with open(source, "rb") as a, open(target, "rb") as b:
        while chunk := a.read(CHUNK):
            if b.read(CHUNK) != chunk:
                raise VerificationError(f"'{target}' differs from '{source}'.")
            sha256.update(chunk)
            progress(len(chunk))
    return sha256.hexdigest()


def digest(path: Path, progress: Progress = _ignore) -> str:
    """Return the SHA-256 of a file."""
    sha256 = hashlib.sha256()
    with open(path, "rb") as file:
        while chunk := file.read(CHUNK):
            sha256.update(chunk)
            progress(len(chunk))
    return sha256.hexdigest()


def _are_equal(source: Path, target: Path) -> bool:
    try:
        compare(source, target)
    except VerificationError:
        return False
    return True


def copy_anew(source: Path, target: Path) -> None:
    """Copy a file, in place of any file or link at `target`.

    Raises `OSError`, also when `source` is no regular file.
    """
    if os.path.lexists(target):
        target.unlink()
    _copy(source, target)


def _copy(source: Path, target: Path, progress: Progress = _ignore) -> None:
    with opened_to_copy(source, target) as (a, b):
        size, done = os.fstat(a.fileno()).st_size, 0
        if _reflink(a.fileno(), b.fileno()):
            progress(size)
            return
        while count := _copy_some(a.fileno(), b.fileno(), done):
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
