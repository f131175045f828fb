"""Writing, copying and comparing files: whole or not at all, within a folder, and under a lock."""

import errno
import hashlib
import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from hf_hyperconn.errors import ConversionError, VerificationError

# a link is not followed, and a pipe is not waited for; where the system knows these
OWN_FILE_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

PART = re.compile(r"\.hyperconn-[0-9a-f]{16}\.part")  # an incomplete file

CHUNK = 2**20
COPIED_AT_ONCE = 2**26

Progress = Callable[[int], None]  # called with each number of bytes done


def replace_file(path: Path, content: bytes) -> None:
    """Make a file hold `content`, in one step; a failure leaves the old file.

    A link is replaced, not its target. A file keeps its permissions. Raises `OSError`.
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
    """Tell whether a name belongs to a file that a killed process left incomplete."""
    return PART.fullmatch(name) is not None


def remove_parts(folder: Path) -> None:
    """Remove the files that a killed process left incomplete from a locked folder."""
    for name in filter(is_part, os.listdir(folder)):
        (folder / name).unlink()


@contextmanager
def opened_to_copy(source: Path, target: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Open a file to read, and a new file to write with no more permissions.

    Raises `OSError`, also when `source` is a symbolic link or no regular file, or there is a `target`.
    """
    if not is_regular(source):
        raise OSError(0, f"'{source}' is not a regular file")
    with open(source, "rb", opener=lambda path, flags: os.open(path, flags | OWN_FILE_FLAGS)) as file:
        status = os.fstat(file.fileno())
        if not stat.S_ISREG(status.st_mode):  # put there meanwhile
            raise OSError(0, f"'{source}' is not a regular file")
        with _create(target, 0o600 | status.st_mode & 0o666) as copy:
            yield file, copy


def _ignore(count: int) -> None:
    pass


def copy_or_link(source: Path, target: Path, link: str, progress: Progress) -> None:
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
    """Compare two files and return their common SHA-256; a file and a link to it are read once.

    Raises `VerificationError` when they differ.
    """
    if os.path.samefile(source, target):
        return file_digest(source, progress)
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


def file_digest(path: Path, progress: Progress = _ignore) -> str:
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


def make_folder(path: Path, like: Path, file: Path | None = None) -> None:
    """Make a folder that no more users may enter than the folder `like`, or than may read `file`.

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

    In a snapshot of the Hub's cache, links to files of the cache are allowed.
    """
    folder, target = Path(os.path.realpath(folder)), Path(os.path.realpath(path))
    is_of_cache = folder.parent.name == "snapshots" and target.parent == folder.parents[1] / "blobs"
    return not (target.is_relative_to(folder) or is_of_cache)


def _create(path: Path, mode: int) -> BinaryIO:
    """Create a file to write, with `mode` less the process's umask."""
    return open(path, "xb", opener=lambda name, flags: os.open(name, flags, mode))


def lock(folder: Path) -> ExitStack:
    """Lock a folder against other commands, where the system can, until the returned context is left.

    Raises `ConversionError` when another command holds it, and `NotADirectoryError` for a link or a file. Raises
    `FileNotFoundError` when the folder is gone, even if it went during this call.
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
