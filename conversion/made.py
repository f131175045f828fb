"""What of a folder a conversion made, by its record, and what came there otherwise."""

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hf_hyperconn.errors import UnsupportedCheckpointError

from .files import is_of_volume, is_part
from .record import read_record
from .source import RECORD, LocalSource
from .transfer import digest

MARK = ".hyperconn_refresh"  # in the folder of a refresh, until all that it does is done

Listing = dict[str, tuple[int, int, int]]


@dataclass(frozen=True)
class Contents:
    """What a folder holds.

    files: inode, size in bytes and time of change in ns, by path; of everything that is no folder.
    not_made: those that no conversion made, or that are no longer as it made them.
    not_known: base shards of the recorded size and without a recorded SHA-256, so that they may be either.
    """

    files: Listing
    not_made: tuple[str, ...]
    not_known: tuple[str, ...] = ()

    @property
    def others(self) -> tuple[str, ...]:
        """What can't be made again, as far as is known."""
        return tuple(sorted(self.not_made + self.not_known))


def listing(folder: Path) -> Listing:
    """The `files` of a folder's contents but for the mark of a refresh, links not followed.

    Raises `OSError` when all of it can't be seen.
    """
    found = {}
    for place, folders, names in _walk(folder):
        links = (name for name in folders if os.path.islink(os.path.join(place, name)))
        for path in (os.path.join(place, name) for name in (*names, *links)):
            status = os.lstat(path)
            name = os.path.relpath(path, folder).replace(os.sep, "/")
            found[name] = (status.st_ino, status.st_size, status.st_mtime_ns)
    found.pop(MARK, None)
    return found


def folders_in(folder: Path) -> list[str]:
    """The paths of the folders in a folder, each after the one that it is in, links not followed.

    Raises `OSError` when all of them can't be seen.
    """
    found = []
    for place, folders, _ in _walk(folder):
        paths = (os.path.join(place, name) for name in folders)
        found += [os.path.relpath(path, folder) for path in paths if not os.path.islink(path)]
    return found


def contents_of(folder: Path) -> Contents | None:
    """What a folder of a conversion holds; None of anything else.

    Its files are read, to compare their SHA-256 with the recorded. Raises `OSError` when they can't be.
    """
    if folder.is_symlink() or not folder.is_dir() or not is_regular(folder / RECORD):
        return None
    files = listing(folder)
    try:
        record = read_record(LocalSource(folder))
    except UnsupportedCheckpointError:
        return None
    assert record is not None  # its file is there
    return Contents(files, *_not_made(folder, files, record))


def is_regular(path: Path) -> bool:
    """Whether a path is a regular file, and no link to one."""
    try:
        return stat.S_ISREG(path.lstat().st_mode)
    except FileNotFoundError:
        return False


def _not_made(folder: Path, files: Listing, record: dict) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """`not_made` and `not_known` of the contents; in neither are links to shards and what a killed command left."""
    from huggingface_hub.utils import tqdm

    digests = {**(record.get("files") or {}), **(record.get("card") or {})}
    digests[record.get("hyper_connection_shard")] = record.get("hyper_connection_sha256")
    shards = {shard["file"]: shard for shard in record["base_shards"]}
    found, not_known, total = [], [], sum(size for _, size, _ in files.values())
    with tqdm(total=total, unit="B", unit_scale=True, desc="Checking OUT", disable=None) as bar:
        for name, (_, size, _) in sorted(files.items()):
            path, shard = folder / name, shards.get(name, {})
            known = shard.get("sha256") or digests.get(name)
            if name == RECORD or is_part(name) or (shard and path.is_symlink()):  # the base has what a link leads to
                continue
            might_be = is_regular(path) and (shard or known) and shard.get("size", size) == size
            if might_be and not known:
                not_known.append(name)
            elif not might_be or digest(path, bar.update) != known:
                found.append(name)
    return tuple(found), tuple(not_known)


def _walk(folder: Path) -> Iterator[tuple[str, list[str], list[str]]]:
    """As `os.walk`, but what can't be read is an error, except for what a file system keeps for itself."""

    def refuse(error: OSError) -> None:
        if not is_of_volume(error, folder):
            raise error

    return os.walk(folder, onerror=refuse)
