"""The record of a conversion, hyperconn_conversion.json: its base, digests of its files, its comparison."""

import errno
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hf_hyperconn.errors import ConversionError, UnsupportedCheckpointError

from ..files.writing import as_json, file_digest, lock, replace_file
from .checkpoint_files import read_json_object
from .source import COMMIT, RECORD, REPO_ID, LocalSource, Source

SHA256 = re.compile("[0-9a-f]{64}")
NO_WRITING = (errno.EACCES, errno.EPERM, errno.EROFS)

FolderState = dict[str, tuple[int, ...]]

# types of the values that are read, by part
TEXT_OR_NONE = (str, type(None))
BASE = {"model": str, "commit": TEXT_OR_NONE}
SHARD = {"file": str, "source": str, "size": int, "sha256": TEXT_OR_NONE}
PARTS: dict[str, dict[str, Any]] = {
    "arguments": {"hc_mult": int, "connection": str, "hc_tanh": bool},
    "versions": {"hf_hyperconn": str},
    "base_card": {},
    "files": {},
    "card": {},
    "verification": {"tensors": int, "comparisons": list, "layers": (list, type(None))},
}
COMPARISON = {
    "dtype": str,
    **dict.fromkeys(("logits", "hidden_states"), bool),
    "continuation": (bool, type(None)),
    **dict.fromkeys(("max_difference", "kl", "top1"), (int, float)),
}


class ClosedFolderError(ConversionError):
    """A folder without permission to write."""


def read_record(source: Source) -> dict | None:
    """Return the record of a conversion; None of a checkpoint without one.

    It has the keys `base` and `base_shards`. Each of the other `PARTS` is None or as the converter writes it.

    Raises `UnsupportedCheckpointError` when the file is not as the converter writes it.
    """
    if RECORD not in source.files:
        return None
    record = read_json_object(source, RECORD)
    if fault := _fault(record):
        raise UnsupportedCheckpointError(
            f"{RECORD} of {source.name!r} is not as the converter writes it ({fault}). Convert the base again."
        )
    return record


def base_of(config: dict, record: dict | None) -> tuple[str | None, str | None]:
    """Return the base of a checkpoint, and its commit on the Hub.

    After training there is no record of a conversion. The config still names a base on the Hub.
    """
    if record is None:
        return config.get("hc_base_model"), config.get("hc_base_commit")
    return record["base"]["model"], record["base"]["commit"]


def base_on_the_hub(config: dict, record: dict | None) -> tuple[str | None, str | None]:
    """Return id and commit of a base on the Hub; the commit is None if not known."""
    base, commit = base_of(config, record)
    is_named = commit is not None or base == config.get("hc_base_model")
    return (base, commit) if is_named and REPO_ID.fullmatch(str(base)) and base is not None else (None, None)


def is_verified(record: dict) -> bool:
    """Tell whether the conversion has been compared with its base."""
    return bool(record.get("verification"))


def shards_without_digest(record: dict) -> tuple[str, ...]:
    """Return the base shards without a recorded SHA-256, whose changes go unnoticed."""
    return tuple(shard["file"] for shard in record["base_shards"] if shard["sha256"] is None)


def folder_state(folder: Path) -> FolderState | None:
    """Return the state of a folder for `record_comparison`; None when it can't be read in full."""
    try:
        return _folder_state(folder)
    except (OSError, UnsupportedCheckpointError):
        return None


def record_comparison(folder: Path, report: Mapping, compared: FolderState | None) -> bool:
    """Record that a conversion equals its base, unless it is recorded already.

    Missing SHA-256 of base shards are recorded, too.

    report: of a verification that passed, as `VerificationReport.as_dict` gives it. Nothing is noted of a report
        without a base, or of a trained checkpoint.
    compared: the folder's state before the verification, by `folder_state`.

    Returns whether the record was changed. Raises `ClosedFolderError` when the folder may only be read. Raises
    `ConversionError` when the record can't be written for another reason, and when the folder has changed. Raises it
    also when a conversion or a refresh is at work on it.
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
                noted, seen = _with_comparison(source, record, report), _folder_state(real)
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
        raise (ClosedFolderError if error.errno in NO_WRITING else ConversionError)(
            f"{equal} '{folder / RECORD}' can't be written: {error.strerror}. Allow that, and verify again."
        ) from error
    return True


def _folder_state(folder: Path) -> FolderState:
    """Return inode, size and time of change of every file in a folder; for links, also the target's."""
    seen: FolderState = {}
    for name in LocalSource(folder).files:
        path = folder / name
        seen[name] = tuple(
            value
            for status in (path.lstat(), path.stat())
            for value in (status.st_ino, status.st_size, status.st_mtime_ns)
        )
    return seen


def _with_comparison(source: LocalSource, record: dict, report: Mapping) -> dict:
    """Return a record with the comparison and every digest in it."""
    digests = {name: file_digest(source.path(name)) for name in shards_without_digest(record) if name in source.files}
    shards = [{**shard, "sha256": digests.get(shard["file"], shard["sha256"])} for shard in record["base_shards"]]
    return {**record, "base_shards": shards, "verification": record.get("verification") or report}


def _fault(record: dict) -> str | None:
    """Find the first part of a record that is not as the converter writes it."""
    shards = record.get("base_shards")
    if not isinstance(shards, list):
        return f"base_shards is {shards!r:.40}"
    for name in ("hyper_connection_shard", "hyper_connection_sha256"):
        if not isinstance(record.get(name), TEXT_OR_NONE):
            return f"{name} is {record[name]!r:.40}"
    verification: Any = record.get("verification")
    comparisons = verification.get("comparisons") if isinstance(verification, dict) else None
    parts: list[tuple[str, Any, dict[str, Any]]]
    parts = [("base", record.get("base"), BASE), *(("base_shards", shard, SHARD) for shard in shards)]
    parts += [(name, record[name], fields) for name, fields in PARTS.items() if record.get(name) is not None]
    if isinstance(comparisons, list):
        parts += [("comparisons", comparison, COMPARISON) for comparison in comparisons]
    for name, part, fields in parts:
        if not isinstance(part, dict):
            return f"{name} is {part!r:.40}"
        for field, accepted in fields.items():
            if not _is_of(part.get(field), accepted):
                return f"{field} of {name} is {part.get(field)!r:.40}"
            if field not in part:
                return f"{name} has no {field}"
    for name, sha256 in (record.get("files") or {}).items():
        if not (isinstance(sha256, str) and SHA256.fullmatch(sha256)):
            return f"{name!r:.40} of files is {sha256!r:.40}"
    if comparisons and not _are_layers(verification["layers"]):
        return f"layers of verification is {verification['layers']!r:.40}"
    commit = record["base"]["commit"]
    return None if commit is None or COMMIT.fullmatch(commit) else f"commit of base is {commit!r:.40}"


def _is_of(value, accepted: type | tuple[type, ...]) -> bool:
    """Tell whether a value of JSON has a type; true and false are no numbers."""
    types = accepted if isinstance(accepted, tuple) else (accepted,)
    return isinstance(value, types) and (not isinstance(value, bool) or bool in types)


def _are_layers(value) -> bool:
    """Tell whether a value is a pair of numbers: of layers that ran, and of all layers."""
    return isinstance(value, list) and len(value) == 2 and all(_is_of(count, int) for count in value)
