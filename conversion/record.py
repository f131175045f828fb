"""hyperconn_conversion.json: where a converted checkpoint comes from, and what verification found."""

import json
from pathlib import Path
from typing import TYPE_CHECKING

from hf_hyperconn.errors import ConversionError, UnsupportedCheckpointError

from .checkpoint import read_json
from .plan import RECORD
from .source import REPO_ID, LocalSource, Source

if TYPE_CHECKING:
    from .verify import VerificationReport


def read_record(source: Source) -> dict | None:
    """The record of a conversion; None of a checkpoint that has none.

    Its keys `base` (`model`, `commit`) and `base_shards` (each with `file`, `source`, `size`, `sha256`) are there.

    Raises `UnsupportedCheckpointError` when the file is not as the converter writes it.
    """
    if RECORD not in source.files:
        return None
    record = read_json(source, RECORD)
    try:
        shards = [(shard["file"], shard["source"]) for shard in record["base_shards"]]
        digests = [shard["sha256"] for shard in record["base_shards"]]
        texts = [record["base"]["model"], *(name for shard in shards for name in shard)]
        known = [text for text in (record["base"]["commit"], *digests) if text is not None]
    except (KeyError, TypeError) as error:
        raise UnsupportedCheckpointError(_strange(source, f"it lacks {error}")) from error
    if strange := [value for value in (*texts, *known) if not isinstance(value, str)]:
        raise UnsupportedCheckpointError(_strange(source, f"{strange[0]!r} is no text"))
    return record


def base_of(config: dict, record: dict | None) -> tuple[str | None, str | None]:
    """What a checkpoint was converted from, and its commit on the Hub.

    After training there is no record of a conversion; of a base on the Hub the config still tells.
    """
    if record is None:
        return config.get("hc_base_model"), config.get("hc_base_commit")
    return record["base"]["model"], record["base"]["commit"]


def base_on_the_hub(config: dict, record: dict | None) -> tuple[str | None, str | None]:
    """Id and commit of a base that is no local folder; the commit is None where it is not known."""
    base, commit = base_of(config, record)
    is_named = commit is not None or base == config.get("hc_base_model")
    return (base, commit) if is_named and REPO_ID.fullmatch(str(base)) and base is not None else (None, None)


def is_verified(record: dict) -> bool:
    """Whether the conversion has been compared with its base."""
    return bool(record.get("verification"))


def record_verification(folder: Path, report: "VerificationReport") -> bool:
    """Note in the record of a conversion that it was compared with its base and equals it, if that isn't there yet.

    report: of a verification that passed. Nothing is noted of one without a base, or of a trained checkpoint, which is
        no longer what was recorded.

    Returns whether the record was changed. Raises `ConversionError` when it can't be written.
    """
    record = read_record(LocalSource(folder))
    if record is None or is_verified(record) or report.trained or report.changed != 0:
        return False
    path = folder / RECORD
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(json.dumps({**record, "verification": report.as_dict()}, indent=2) + "\n", encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise ConversionError(
            f"'{folder}' is equal to its base, but '{path}' can't be written: {error.strerror}. Allow that, and "
            f"verify again."
        ) from error
    return True


def _strange(source: Source, what: str) -> str:
    return f"{RECORD} of {source.name!r} is not what the converter writes ({what}). Convert the base again."
