"""Files of a checkpoint's folder: written whole or not at all, not outside of it, and not for more people to read."""

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

# a link is not followed, and a pipe is not waited for; where the system knows these
ITSELF = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

PART = re.compile(r"\.hyperconn-[0-9a-f]{16}\.part")  # what is not complete yet


def replace_file(path: Path, content: bytes) -> None:
    """Make a file hold `content`, in one step; when that fails, it is as it was.

    A link is replaced, not what it leads to. Who may read a file stays as it was. Raises `OSError`.
    """
    part = path.with_name(f".hyperconn-{secrets.token_hex(8)}.part")  # nobody else's
    file = _create(part, _mode(path))
    try:
        with file:
            file.write(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def is_part(name: str) -> bool:
    """Whether a file has the name of what `replace_file` had not completed when its process was killed."""
    return PART.fullmatch(name) is not None


@contextmanager
def opened_to_copy(source: Path, target: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """A file to read and a new one to write, which is for nobody to read whom the first is not for.

    Raises `OSError`, also when `source` is a symbolic link or no regular file, or there is a `target`.
    """
    if not stat.S_ISREG(source.lstat().st_mode):
        raise OSError(0, f"'{source}' is not a regular file")
    with open(source, "rb", opener=lambda path, flags: os.open(path, flags | ITSELF)) as file:
        mode = os.fstat(file.fileno()).st_mode
        if not stat.S_ISREG(mode):  # put there meanwhile
            raise OSError(0, f"'{source}' is not a regular file")
        with _create(target, mode) as copy:
            yield file, copy


def make_folder(path: Path, like: Path) -> None:
    """Make a folder that is closed to whom the folder `like` is closed. Raises `OSError`."""
    path.mkdir(mode=0o700 | like.stat().st_mode & 0o777)


def leads_out(folder: Path, path: Path) -> bool:
    """Whether a path in a folder leads out of it, by a symbolic link.

    In a snapshot of the Hub's cache, links to the files of that cache do not.
    """
    folder, target = (Path(os.path.realpath(each)) for each in (folder, path))
    is_of_cache = folder.parent.name == "snapshots" and target.parent == folder.parents[1] / "blobs"
    return not (target.is_relative_to(folder) or is_of_cache)


def _create(path: Path, mode: int) -> BinaryIO:
    """A new file, which its owner may change; others as `mode` says, as far as the process's umask lets them."""
    mode = 0o600 | mode & 0o666
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))


def _mode(path: Path) -> int:
    """Who may read a file that is to be replaced; a new one is for all that the process's umask lets in."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return 0o666
    return mode if stat.S_ISREG(mode) else 0o666
