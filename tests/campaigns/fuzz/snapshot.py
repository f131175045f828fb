"""What a folder holds, so that nothing changes unseen."""

import hashlib
import os
import stat
from pathlib import Path

LARGEST = 2**24  # bytes of a file that is read; of a larger one, which is sparse, the time of its last change tells


def snapshot(folder: Path, *without: str) -> dict[bytes, tuple]:
    """Return kind, permissions and content of everything in a folder, by path; links are not followed.

    without: paths in the folder that are left out, with what is in them.
    """
    entries: dict[bytes, tuple] = {}
    left_out = {os.fsencode(folder / name) for name in without}

    def look(path: bytes) -> None:
        if path in left_out:
            return
        status = os.lstat(path)
        entries[os.path.relpath(path, os.fsencode(folder))] = (stat.filemode(status.st_mode), _content(path, status))
        if stat.S_ISDIR(status.st_mode):
            for entry in sorted(os.listdir(path)):
                look(os.path.join(path, entry))

    look(os.fsencode(folder))
    return entries


def differences(before: dict[bytes, tuple], after: dict[bytes, tuple]) -> dict[str, str]:
    """Return whether a path is new, gone or changed, by the path."""
    return {
        os.fsdecode(path): "is new" if path not in before else "is gone" if path not in after else "is changed"
        for path in sorted(before.keys() | after.keys())
        if before.get(path) != after.get(path)
    }


def holding(folder: Path, marks: tuple[bytes, ...]) -> list[tuple[bytes, bytes]]:
    """Return path and mark of every regular file in a folder that holds one of some marks."""
    hits = []
    for root, _, files in os.walk(os.fsencode(folder)):
        for name in sorted(files):
            path = os.path.join(root, name)
            status = os.lstat(path)
            if stat.S_ISREG(status.st_mode) and status.st_size <= LARGEST:
                content = _read(path)
                hits += [(os.path.relpath(path, os.fsencode(folder)), mark) for mark in marks if mark in content]
    return hits


def _content(path: bytes, status: os.stat_result):
    if stat.S_ISLNK(status.st_mode):
        return os.readlink(path)
    if stat.S_ISREG(status.st_mode):
        return hashlib.sha256(_read(path)).digest() if status.st_size <= LARGEST else status.st_mtime_ns
    return None


def _read(path: bytes) -> bytes:
    with open(path, "rb") as file:
        return file.read()
