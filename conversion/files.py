"""Files of a checkpoint's folder: written whole or not at all, not outside of it, and not for more people to read."""

import os
import re
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

# a link is not followed, and a pipe is not waited for; where the system knows these
ITSELF = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

PART = re.compile(r"\.hyperconn-[0-9a-f]{16}\.part")  # what is not complete yet


def replace_file(path: Path, content: bytes) -> None:
    """Make a file hold `content`, in one step; when that fails, it is as it was.

    A link is replaced, not what it leads to. Nobody may read it who could not before. Raises `OSError`.
    """
    part = path.with_name(f".hyperconn-{secrets.token_hex(8)}.part")  # nobody else's
    file = _create(part, _regular(path))
    try:
        with file:
            file.write(content)
        part.replace(path)
    finally:
        part.unlink(missing_ok=True)


def is_of_volume(error: OSError, folder: Path) -> bool:
    """Whether what can't be read in a folder is what a file system keeps at its root, which only root may read."""
    return Path(str(error.filename)) == folder / "lost+found"


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
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):  # put there meanwhile
            raise OSError(0, f"'{source}' is not a regular file")
        with _create(target, status) as copy:
            yield file, copy


def make_folder(path: Path, like: Path) -> None:
    """Make a folder that is closed to whom the folder `like` is closed. Raises `OSError`."""
    status = like.stat()
    path.mkdir(mode=0o700 | status.st_mode & 0o777)
    _share(path, stat.S_IMODE(path.stat().st_mode), status)


def close_folder(path: Path, like: Path) -> None:
    """Close a folder to whom the folder `like` is closed, or one around it that is not around `path`.

    Raises `OSError`.
    """
    like, path = Path(os.path.realpath(like)), Path(os.path.realpath(path))
    status = like.stat()
    _share(path, stat.S_IMODE(path.stat().st_mode) & (0o7700 | status.st_mode), status)
    group, closed = path.stat().st_gid, 0
    for around in {*like.parents} - {*path.parents}:
        entered = around.stat()
        group_enters, others_enter = bool(entered.st_mode & 0o010), bool(entered.st_mode & 0o001)
        if entered.st_gid != group:  # members of either may be of the other, too
            group_enters = others_enter = group_enters and others_enter
        closed |= 0o070 * (not group_enters) | 0o007 * (not others_enter)
    _set_mode(path, stat.S_IMODE(path.stat().st_mode) & ~closed)


def keep_mode(path: Path, like: Path) -> None:
    """Give a folder that `make_folder` gave the group of `like` its whole mode, too, unless the system refuses."""
    with suppress(OSError):
        status = like.stat()
        if path.stat().st_gid == status.st_gid:
            path.chmod(0o700 | stat.S_IMODE(status.st_mode))


def leads_out(folder: Path, path: Path) -> bool:
    """Whether a path in a folder leads out of it, by a symbolic link.

    In a snapshot of the Hub's cache, links to the files of that cache do not.
    """
    folder, target = (Path(os.path.realpath(each)) for each in (folder, path))
    is_of_cache = folder.parent.name == "snapshots" and target.parent == folder.parents[1] / "blobs"
    return not (target.is_relative_to(folder) or is_of_cache)


def _create(path: Path, like: os.stat_result | None) -> BinaryIO:
    """A new file, which its owner may change; others as `like` says, as far as the process's umask lets them."""
    mode = 0o666 if like is None else 0o600 | like.st_mode & 0o666
    file = _opened(path, mode)
    status = os.fstat(file.fileno())
    if like is None or status.st_gid == like.st_gid:
        return file
    try:
        file.close()
        path.unlink()  # the group that it was made with may have opened it
        file = _opened(path, 0o600)
        _share(path, stat.S_IMODE(status.st_mode), like)
    except BaseException:
        file.close()
        path.unlink(missing_ok=True)
        raise
    return file


def _opened(path: Path, mode: int) -> BinaryIO:
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))


def _share(path: Path, mode: int, like: os.stat_result) -> None:
    """Give what was made the group of `like`, and a mode.

    Where it can't have that group, its own gets nothing, and others what the group of `like` gets as well.
    """
    if path.stat().st_gid != like.st_gid:
        try:
            os.chown(path, -1, like.st_gid)
        except OSError:
            mode &= 0o7700 | mode >> 3 & 0o007
    _set_mode(path, mode)


def _set_mode(path: Path, mode: int) -> None:
    if stat.S_IMODE(path.stat().st_mode) != mode:
        try:
            path.chmod(mode)
        except PermissionError as error:
            reason = "permissions can't be set there, and what it is made of is closed to others"
            raise PermissionError(error.errno, reason, str(path)) from error


def _regular(path: Path) -> os.stat_result | None:
    """The file that is to be replaced; None of a new one, or of what is no regular file."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    return status if stat.S_ISREG(status.st_mode) else None
