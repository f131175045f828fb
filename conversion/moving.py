"""A finished conversion gets its name: at once, and in place of nothing but what its plan found there."""

import ctypes
import errno
import os
import shutil
import sys
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path

from hf_hyperconn.errors import ConversionError

from .made import Contents, Listing, folders_in, listing
from .place import Place
from .source import RECORD

# of <fcntl.h> and <linux/fs.h>; of <sys/stdio.h> on macOS
AT_FDCWD, RENAME_NOREPLACE, RENAME_EXCL = -100, 1, 4
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def check_unchanged(place: Place) -> None:
    """Raise `ConversionError` when another thing is at OUT than its plan found there."""
    if place.replaced is None and os.path.lexists(place.out):
        raise ConversionError(
            f"'{place.out}' has appeared meanwhile and is not replaced. Move it away and run the same command again, "
            f"which continues from '{place.work}'."
        )
    if place.replaced is not None and not holds(place.out, place.replaced):
        raise ConversionError(
            f"'{place.out}' has changed meanwhile and is not replaced. Check what is new there and run the same "
            f"command again, which continues from '{place.work}'."
        )


def put_in_place(place: Place, *, is_locked: bool = False) -> None:
    """Rename `place.work` to `place.out`; what the plan found there is kept beside it until then, and removed.

    is_locked: whether the caller holds the lock of what is at OUT.

    Raises `ConversionError` when another thing is there, or another conversion at work on it, and `OSError` when
    renaming fails. Then everything is where it was.
    """
    check_unchanged(place)
    if place.replaced is None:
        try:
            rename_new(place.work, place.out)
        except FileExistsError:
            check_unchanged(place)
            raise
        _remove_leftover(place)
        return
    with nullcontext() if is_locked else held(place.out):
        _remove_leftover(place)
        if os.path.lexists(place.previous):
            raise ConversionError(f"'{place.previous}' is in the way. Rename it, or remove it, and run this again.")
        _exchange(place)
        _remove(place.previous, place.replaced)


def rename_new(source: Path, target: Path) -> None:
    """Rename a folder; what has the name `target` already stays as it is, even if it came this instant.

    Where the system or the file system has no such renaming, an empty folder that came this instant is replaced.

    Raises `FileExistsError` when there is a `target`, and `OSError`.
    """
    try:
        _rename_new(source, target)
    except OSError as error:
        if error.errno != errno.EXDEV:  # both are in one folder
            raise
        reason = "a folder in a lower layer of an image can't be renamed: copy it (cp -r), and work on the copy"
        raise OSError(errno.EXDEV, reason, str(source)) from error


def _rename_new(source: Path, target: Path) -> None:
    sys.audit("os.rename", source, target, -1, -1)  # as os.rename does
    if _renamed_exclusively(os.fsencode(source), os.fsencode(target)):
        return
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    try:
        os.rename(source, target)
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.ENOTDIR):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target)) from error
        raise


def held(folder: Path) -> ExitStack:
    """Keep other conversions from a folder, where the system can, from this call until what it returns is left.

    Raises `ConversionError` when another conversion holds it, `NotADirectoryError` for a link or a file, and
    `FileNotFoundError` when the folder is gone, even if that was while it was asked for.
    """
    holding = ExitStack()
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    try:
        from fcntl import LOCK_EX, LOCK_NB, flock
    except ImportError:  # not a Unix
        return holding
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    with holding:
        holding.callback(os.close, descriptor)
        try:
            flock(descriptor, LOCK_EX | LOCK_NB)
        except BlockingIOError as error:
            raise ConversionError(
                f"another conversion is working in '{folder}', or a refresh. Wait for it, then run this again."
            ) from error
        except OSError:  # a file system without locks
            return holding.pop_all()
        if not os.path.samestat(os.fstat(descriptor), os.lstat(folder)):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
        return holding.pop_all()


def _exchange(place: Place) -> None:
    """Move what is at OUT aside and the conversion there; when that fails, all is as it was."""
    old = place.out.lstat()
    try:
        rename_new(place.out, place.previous)
        assert place.replaced is not None
        if not holds(place.previous, place.replaced):
            raise ConversionError(f"'{place.out}' changed while it was replaced, so it stays. Check what is new.")
        rename_new(place.work, place.out)
    except BaseException as error:
        if not (_is(place.previous, old) and os.path.lexists(place.work)):
            raise
        try:
            rename_new(place.previous, place.out)
        except OSError:
            raise ConversionError(
                f"'{place.out}' could not be replaced ({error}). What it was is '{place.previous}'; the finished "
                f"conversion is '{place.work}'."
            ) from error
        raise


def _remove_leftover(place: Place) -> None:
    """Remove what is left of a replacement that was cut off, unless it can't be."""
    if place.leftover is not None:
        with suppress(ConversionError, OSError), held(place.previous):
            _remove(place.previous, place.leftover)


def remove_rest(folder: Path, files: Listing) -> None:
    """Remove what is left of a folder that held `files`, unless it holds anything else or can't be removed."""
    with suppress(ConversionError, OSError), held(folder):
        left = listing(folder)
        if left.items() <= files.items():
            _remove(folder, Contents(left, ()))


def _remove(folder: Path, contents: Contents) -> None:
    """Remove a conversion, unless it can't be: its record last, so that a part of it is known for one."""
    with suppress(OSError):
        if listing(folder) != contents.files:
            return
        for path in (folder / name for name in ("", *folders_in(folder))):
            if ~path.stat().st_mode & 0o700:
                path.chmod(0o700)
        for path in folder.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name != RECORD:
                path.unlink()
        (folder / RECORD).unlink(missing_ok=True)
        folder.rmdir()


def _is(folder: Path, status: os.stat_result) -> bool:
    try:
        return os.path.samestat(folder.lstat(), status)
    except OSError:
        return False


def holds(folder: Path, contents: Contents) -> bool:
    """Whether a folder holds what it did; it may be gone."""
    try:
        return not folder.is_symlink() and listing(folder) == contents.files
    except OSError:
        return False


def _renamed_exclusively(source: bytes, target: bytes) -> bool:
    """Rename by the system's call that replaces nothing; False where there is none."""
    try:
        system = ctypes.CDLL(None, use_errno=True)
        if sys.platform == "darwin":
            failed = system.renamex_np(source, target, RENAME_EXCL)
        else:
            failed = system.renameat2(AT_FDCWD, source, AT_FDCWD, target, RENAME_NOREPLACE)
    except (AttributeError, OSError, TypeError):
        return False
    if not failed:
        return True
    code = ctypes.get_errno()
    if code in UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), os.fsdecode(source), None, os.fsdecode(target))
