"""A comparison of a conversion with its base, noted in the record of the files that were compared and of no others."""

import json
import os
from collections.abc import Mapping
from pathlib import Path

from hf_hyperconn.errors import ConversionError

from .files import replace_file
from .made import Listing, listing
from .moving import held
from .record import is_verified, lacks_digests, read_record
from .source import RECORD, LocalSource
from .transfer import digest


def files_now(folder: Path) -> Listing | None:
    """What `record_comparison` takes, before the comparison; None when the folder can't be read in full."""
    try:
        return listing(folder)
    except OSError:
        return None


def record_comparison(folder: Path, report: Mapping, compared: Listing | None) -> bool:
    """Note in the record of a conversion that it was compared with its base and equals it, if that isn't there yet.

    The SHA-256 of base shards that the conversion did not record are noted, too.

    report: of a verification that passed, as `VerificationReport.as_dict` gives it. Nothing is noted of one without a
        base, or of a trained checkpoint, which is no longer what was recorded.
    compared: what `files_now` gave before it.

    Returns whether the record was changed. Raises `ConversionError` when it can't be written, when the folder holds
    other files than before, and when a conversion or a refresh is at work on it.
    """
    if report["trained"] or report["changed"] != 0:
        return False
    real = Path(os.path.realpath(folder))
    record = read_record(LocalSource(real))
    if record is None or (is_verified(record) and not lacks_digests(record)):
        return False
    try:
        with held(real):
            source = LocalSource(real)
            noted = _noted(source, read_record(source), report)
            if listing(real) != compared:
                raise ConversionError(
                    f"'{folder}' was changed while it was compared with the base, so that nothing is recorded of it. "
                    f"Verify it again."
                )
            replace_file(real / RECORD, (json.dumps(noted, indent=2) + "\n").encode())
    except OSError as error:
        raise ConversionError(
            f"'{folder}' is equal to its base, but '{folder / RECORD}' can't be written: {error.strerror}. Allow "
            f"that, and verify again."
        ) from error
    return True


def _noted(source: LocalSource, record: dict | None, report: Mapping) -> dict:
    """A record with the comparison and every digest in it."""
    record = record or {}
    shards = record.get("base_shards", [])
    unknown = {shard["file"] for shard in shards if shard["sha256"] is None} & source.files.keys()
    found = {name: digest(source.path(name)) for name in unknown}
    shards = [{**shard, "sha256": found.get(shard["file"], shard["sha256"])} for shard in shards]
    return {**record, "base_shards": shards, "verification": record.get("verification") or report}
