"""Notes of a comparison with the base, in the record of the compared files alone."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path

from hf_hyperconn.errors import ConversionError, UnsupportedCheckpointError

from ..checkpoint.record import is_verified, read_record, shards_without_digest
from ..checkpoint.source import RECORD, LocalSource
from ..files.transfer import digest
from ..files.writing import as_json, lock, replace_file

Seen = dict[str, tuple[int, ...]]
CLOSED = (errno.EACCES, errno.EPERM, errno.EROFS)


class ClosedFolderError(ConversionError):
    """A folder that may not be written to."""


def files_now(folder: Path) -> Seen | None:
    """Return the state of a folder for `record_comparison`; None when it can't be read in full."""
    try:
        return _seen(folder)
    except (OSError, UnsupportedCheckpointError):
        return None


def record_comparison(folder: Path, report: Mapping, compared: Seen | None) -> bool:
    """Note in the record of a conversion that it equals its base, if that isn't there yet.

    The SHA-256 of base shards that the conversion did not record are noted, too.

    report: of a verification that passed, as `VerificationReport.as_dict` gives it. Nothing is noted of a report
        without a base, or of a trained checkpoint.
    compared: the folder's state before the verification, of `files_now`.

    Returns whether the record was changed. Raises `ClosedFolderError` when the folder may only be read. Raises
    `ConversionError` when the record can't be written otherwise, when the folder holds other files than before, and
    when a conversion or a refresh is at work on it.
    """
    if report["trained"] or report["changed"] != 0:
        return False
    real = Path(os.path.realpath(folder))
    source = LocalSource(real)
    record = read_record(source)
    if record is None or (is_verified(record) and not shards_without_digest(record)):
        return False
    equal = f"'{folder}' is equal to its base, but"
    try:
        with lock(real):
            try:
                noted, seen = _noted(source, record, report), _seen(real)
            except OSError as error:
                raise ConversionError(
                    f"{equal} '{error.filename}' can't be read: {error.strerror}. Allow that, and verify again."
                ) from error
            if seen != compared:
                raise ConversionError(
                    f"'{folder}' was changed while it was compared with the base, so that nothing is recorded of it. "
                    f"Verify it again."
                )
            replace_file(real / RECORD, as_json(noted))
    except OSError as error:
        raise (ClosedFolderError if error.errno in CLOSED else ConversionError)(
            f"{equal} '{folder / RECORD}' can't be written: {error.strerror}. Allow that, and verify again."
        ) from error
    return True


def _seen(folder: Path) -> Seen:
    """Return inode, size and time of change of every file of a folder, and of the targets of links."""
    seen: Seen = {}
    for name in LocalSource(folder).files:
        path = folder / name
        seen[name] = tuple(
            value
            for status in (path.lstat(), path.stat())
            for value in (status.st_ino, status.st_size, status.st_mtime_ns)
        )
    return seen


def _noted(source: LocalSource, record: dict, report: Mapping) -> dict:
    """Return a record with the comparison and every digest in it."""
    digests = {name: digest(source.path(name)) for name in shards_without_digest(record) if name in source.files}
    shards = [{**shard, "sha256": digests.get(shard["file"], shard["sha256"])} for shard in record["base_shards"]]
    return {**record, "base_shards": shards, "verification": record.get("verification") or report}
