"""Writing of files and folders of a checkpoint: whole or not at all, inside of it, and under a lock."""

import errno
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from hf_hyperconn.errors import ConversionError

# a link is not followed, and a pipe is not waited for; where the system knows these
ITSELF = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

PART = re.compile(r"\.hyperconn-[0-9a-f]{16}\.part")  # what is not complete yet


def replace_file(path: Path, content: bytes) -> None:
    """Make a file hold `content`, in one step; a failure leaves the old file.

    A link is replaced, not what it leads to. A file keeps its permissions. Raises `OSError`.
    """
    replace_files(path.parent, {path.name: content})


def replace_files(folder: Path, contents: Mapping[str, bytes | None]) -> None:
    """Make files of a folder hold `contents`, each in one step, in their order; None removes a file.

    All are written beside the old ones first, so that a full disk changes nothing. Raises `OSError`.
    """
    parts: dict[str, Path] = {}
    try:
        for name, content in contents.items():
            if content is not None:
                part = folder / f".hyperconn-{secrets.token_hex(8)}.part"  # nobody else's
                is_new = not is_regular(folder / name)
                with _create(part, 0o666 if is_new else 0o600) as file:
                    parts[name] = part
                    file.write(content)
                if not is_new:
                    with suppress(PermissionError):  # of a mount where permissions can't be set
                        shutil.copymode(folder / name, part)
        for name in contents:
            parts[name].replace(folder / name) if name in parts else (folder / name).unlink(missing_ok=True)
    finally:
        for part in parts.values():
            part.unlink(missing_ok=True)


def as_json(content: object) -> bytes:
    """Return the text of a JSON file."""
    return (json.dumps(content, indent=2) + "\n").encode()


def is_part(name: str) -> bool:
    """Tell whether a name is that of a file that a killed process had not completed."""
    return PART.fullmatch(name) is not None


def remove_parts(folder: Path) -> None:
    """Remove the files that a killed process had not completed, from a folder that is locked."""
    for name in filter(is_part, os.listdir(folder)):
        (folder / name).unlink()


@contextmanager
def opened_to_copy(source: Path, target: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file to read and a new one to write, with no more permissions than the first.

    Raises `OSError`, also when `source` is a symbolic link or no regular file, or there is a `target`.
    """
    if not is_regular(source):
        raise OSError(0, f"'{source}' is not a regular file")
    with open(source, "rb", opener=lambda path, flags: os.open(path, flags | ITSELF)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):  # put there meanwhile
            raise OSError(0, f"'{source}' is not a regular file")
        with _create(target, 0o600 | status.st_mode & 0o666) as copy:
            yield file, copy


def make_folder(path: Path, like: Path, file: Path | None = None) -> None:
    """Make a folder for those alone who may enter the folder `like`, and read `file`.

    Raises `OSError`.
    """
    mode = like.stat().st_mode & 0o777
    for readers in (0o070, 0o007):
        if file is not None and not file.stat().st_mode & readers & 0o444:
            mode &= ~readers
    path.mkdir(mode=0o700 | mode)


def is_regular(path: Path) -> bool:
    """Tell whether a path is a regular file, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def leads_out(folder: Path, path: Path) -> bool:
    """Tell whether a path in a folder leads out of it, by a symbolic link.

    In a snapshot of the Hub's cache, links to the files of the cache do not.
    """
    folder, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    is_of_cache = folder.parent.name == "snapshots" and target.parent == folder.parents[1] / "blobs"
    return not (target.is_relative_to(folder) or is_of_cache)


def _create(path: Path, mode: int) -> BinaryIO:
    """Create a file to write; the process's umask takes from `mode`."""
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))


def lock(folder: Path) -> ExitStack:
    """Keep other commands from a folder, where the system can, until the returned context is left.

    Raises `ConversionError` when another command holds it, `NotADirectoryError` for a link or a file, and
    `FileNotFoundError` when the folder is gone, also when it went during this call.
    """
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    locked = ExitStack()
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:  # not a Unix
        return locked
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    with locked:
        locked.callback(os.close, descriptor)
        try:
            flock(descriptor, LOCK_EX | LOCK_NB)
        except BlockingIOError as error:
            raise ConversionError(
                f"another conversion is working in '{folder}', or a refresh. Wait for it, then run this again."
            ) from error
        except OSError:  # a file system without locks
            return locked.pop_all()
        if not os.path.samestat(os.fstat(descriptor), os.lstat(folder)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        return locked.pop_all()
