"""Bringing weight files to the output, byte for byte."""

import os
import zlib
from collections.abc import Callable
from pathlib import Path

from hf_hyperconn.errors import ConversionError, VerificationError

CHUNK = 4 * 2**20

FICLONE = 0x40049409  # Linux: share the extents of another file, on file systems that can


def bring(source: Path, target: Path, link: str, progress: Callable[[int], None]) -> int:
    """Make `target` hold the bytes of `source`; it appears under its name only when complete.

    link: "copy" (sharing extents where the file system can), "hard" or "symlink".
    progress: called with each number of bytes done.

    Returns the CRC-32 of the bytes. Raises `ConversionError` when the file system refuses and `VerificationError` when
    what was written reads back differently.
    """
    if target.exists():
        try:
            return compare(source, target, progress)
        except VerificationError:
            target.unlink()  # of an earlier attempt, from a source that has changed since
    part = target.with_name(target.name + ".part")
    part.unlink(missing_ok=True)
    try:
        if link == "hard":
            os.link(source, part)
        elif link == "symlink":
            os.symlink(source, part)
        elif not _reflink(source, part):
            checksum = _copy(source, part, progress)
            part.rename(target)
            return checksum
    except OSError as error:
        advice = "Use --link copy." if link != "copy" else "Free some space or choose another OUT."
        raise ConversionError(f"can't bring '{source}' to '{target.parent}': {error.strerror}. {advice}") from error
    checksum = compare(source, part, progress)
    part.rename(target)
    return checksum


def compare(source: Path, target: Path, progress: Callable[[int], None] = lambda count: None) -> int:
    """Read two files side by side and return their common CRC-32.

    Raises `VerificationError` when they differ.
    """
    checksum, here, there = 0, bytearray(CHUNK), bytearray(CHUNK)
    same = os.path.samefile(source, target)
    if not same and source.stat().st_size != target.stat().st_size:
        raise VerificationError(f"'{target}' and '{source}' differ in size.")
    with open(source, "rb", buffering=0) as a, open(target, "rb", buffering=0) as b:
        while count := a.readinto(here):
            if not same and (b.readinto(there) != count or here[:count] != there[:count]):
                raise VerificationError(f"'{target}' differs from '{source}'.")
            checksum = zlib.crc32(memoryview(here)[:count], checksum)
            progress(count)
    return checksum


def _copy(source: Path, target: Path, progress: Callable[[int], None]) -> int:
    """Copy in chunks, each read back while it is warm."""
    checksum, sent, echo = 0, bytearray(CHUNK), bytearray(CHUNK)
    with open(source, "rb", buffering=0) as a, open(target, "w+b", buffering=0) as b:
        offset = 0
        while count := a.readinto(sent):
            _write_all(b.fileno(), memoryview(sent)[:count])
            os.preadv(b.fileno(), [memoryview(echo)[:count]], offset)
            if sent[:count] != echo[:count]:
                raise VerificationError(f"'{target}' does not read back as it was written; check the disk.")
            checksum = zlib.crc32(memoryview(sent)[:count], checksum)
            offset += count
            progress(count)
    return checksum


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _reflink(source: Path, target: Path) -> bool:
    try:
        from fcntl import ioctl
    except ImportError:  # not a Unix
        return False
    with open(source, "rb") as a, open(target, "wb") as b:
        try:
            ioctl(b.fileno(), FICLONE, a.fileno())
        except OSError:
            return False
    return True
