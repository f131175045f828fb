"""One conversion, refresh or note of a comparison at a time in a folder."""

import errno
import os
from contextlib import ExitStack
from pathlib import Path

from hf_hyperconn.errors import ConversionError


def lock(folder: Path) -> ExitStack:
    """Keep other commands from a folder, where the system can, from this call until what it returns is left.

    Raises `ConversionError` when another command holds it, `NotADirectoryError` for a link or a file, and
    `FileNotFoundError` when the folder is gone, even if that was while it was asked for.
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
