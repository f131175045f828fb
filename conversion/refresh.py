"""The command `refresh`: the code of an older folder brought to this release, with its weights untouched."""

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path

import hf_hyperconn
from hf_hyperconn.errors import ConversionError
from hf_hyperconn.families.reading.source_files import release
from hf_hyperconn.kinds import FORMAT

from .checkpoint.checkpoint import Checkpoint, open_conversion
from .checkpoint.checkpoint_files import refuse_links_out
from .checkpoint.model_code import code_files, releases_of_code
from .checkpoint.source import CONFIG, RECORD, Source
from .files.writing import as_json, file_digest, lock, remove_parts, replace_files
from .terminal import name_some
from .verify.changed_files import find_changes


@dataclass(frozen=True)
class Refreshed:
    """The changes of a refresh.

    written_by, now: the releases of hf_hyperconn and Transformers of the old code, and of the new code.
    changed, added, removed: files of model code.
    has_new_config: whether config.json names other classes, or another format or release.
    forgets_verification: whether a recorded comparison of the old code with the base is removed.
    """

    written_by: tuple[str | None, str | None]
    now: tuple[str, str]
    changed: tuple[str, ...]
    added: tuple[str, ...]
    removed: tuple[str, ...]
    has_new_config: bool
    forgets_verification: bool

    @property
    def is_current(self) -> bool:
        """Tell whether there is nothing to do."""
        return not (self.changed or self.added or self.removed or self.has_new_config)

    def lines(self) -> list[str]:
        """Return the summary for people."""
        package, transformers = (release or "unknown" for release in self.written_by)
        lines = [
            f"code of       hf_hyperconn {package}, Transformers {transformers}",
            f"now           hf_hyperconn {self.now[0]}, Transformers {self.now[1]}",
        ]
        for name in ("changed", "added", "removed"):
            if files := getattr(self, name):
                lines.append(f"{name:14}{' '.join(files)}")
        if self.has_new_config:
            lines.append(f"config        {CONFIG} says so")
        return [*lines, "nothing to do"] if self.is_current else lines

    def as_dict(self) -> dict:
        """Return the summary for machines."""
        return {**asdict(self), "is_current": self.is_current}


def refresh(folder: str | Path, *, dry_run: bool = False, accept_changes: bool = False) -> Refreshed:
    """Write the code of this release into the folder of a hyper-connection checkpoint.

    New files are written beside the old ones first, and then renamed, config.json last. The same call completes an
    interrupted refresh. A recorded comparison with the base is removed, because it was of the old code.

    dry_run: whether to return the changes only.
    accept_changes: whether to replace edited code, which is then lost.

    Raises `UnsupportedCheckpointError` for a folder that is no hyper-connection checkpoint of a known format. Raises
    `ConversionError` when it can't be refreshed, for example while a conversion works on it.
    """
    path = Path(os.path.realpath(folder))
    if not path.is_dir():
        raise ConversionError(f"there is no folder '{folder}'. Give the folder of a checkpoint.")
    try:
        with nullcontext() if dry_run else lock(path):
            return _refresh(open_conversion(path), folder, dry_run, accept_changes)
    except OSError as error:
        raise ConversionError(
            f"'{folder}' was not refreshed: {error.strerror or error}. Fix that, and run the same command again."
        ) from error


def _refresh(checkpoint: Checkpoint, given: str | Path, dry_run: bool, accept_changes: bool) -> Refreshed:
    """Refresh a folder, which is locked unless `dry_run`; arguments as for `refresh`."""
    source, family, record = checkpoint.source, checkpoint.family, checkpoint.record
    refuse_links_out(source, code_files(checkpoint))
    texts = {name: text.encode() for name, text in family.code(checkpoint.config).items()}
    old = {name for name in code_files(checkpoint) if name in source.files}
    recorded = (record or {}).get("files") or {}
    removed = {name for name in recorded if name.endswith(".py") and "/" not in name} - texts.keys()
    if not accept_changes:
        beyond = {name: recorded[name] for name in removed - old if name in source.files}
        _refuse_edited(checkpoint, given, kept=old - texts.keys() - removed, beyond=beyond)
        _refuse_unrecorded(source, given, {name: text for name, text in texts.items() if name not in recorded})
    written = checkpoint.raw_config
    new_config = {
        **written,
        "auto_map": {**_of_others(written.get("auto_map"), {*texts, *removed}), **family.auto_map},
        "hc_format": FORMAT,
        "hc_version": hf_hyperconn.__version__,
    }
    refreshed = Refreshed(
        releases_of_code(checkpoint),
        (hf_hyperconn.__version__, release()),
        tuple(sorted(name for name in old & texts.keys() if source.path(name).read_bytes() != texts[name])),
        tuple(sorted(texts.keys() - old)),
        tuple(sorted(removed)),
        new_config != written,
        bool((record or {}).get("verification")),
    )
    if not (dry_run or refreshed.is_current):
        contents: dict[str, bytes | None] = {
            **dict.fromkeys(refreshed.removed),
            **{name: texts[name] for name in (*refreshed.changed, *refreshed.added)},
        }
        if record:
            contents[RECORD] = as_json(_new_record(source, record, refreshed, texts, as_json(new_config)))
        remove_parts(source.folder([]))
        replace_files(source.folder([]), {**contents, CONFIG: as_json(new_config)})
    return refreshed


def _new_record(
    source: Source, record: Mapping, refreshed: Refreshed, texts: Mapping[str, bytes], config: bytes
) -> dict:
    """Return the record without its comparison, with digests and releases of the new files."""
    new = {name: value for name, value in record.items() if name != "verification"}
    package, transformers = refreshed.now
    new["versions"] = {**(new.get("versions") or {}), "hf_hyperconn": package, "transformers": transformers}
    if files := new.get("files"):
        written = dict(texts)
        if file_digest(source.path(CONFIG)) == files.get(CONFIG):  # a changed one stays known for changed
            written[CONFIG] = config
        digests = {name: sha256(content).hexdigest() for name, content in written.items()}
        kept = {name: value for name, value in files.items() if name not in {*texts, *refreshed.removed}}
        new["files"] = dict(sorted((kept | digests).items()))
    return new


def _refuse_edited(checkpoint: Checkpoint, given: str | Path, kept: set[str], beyond: Mapping[str, str]) -> None:
    """Refuse to replace code that somebody has edited.

    kept: files that stay.
    beyond: recorded digests of other removed files, which no file imports any more.

    Raises `ConversionError`.
    """

    def digest_of(name: str) -> str:
        return file_digest(checkpoint.source.path(name))

    changes, _ = find_changes(checkpoint, as_converted=False, digest_of=digest_of)
    edits = [str(change) for change in changes if change.name not in kept]
    edits += [
        f"{name} is not as the conversion wrote it" for name in sorted(beyond) if digest_of(name) != beyond[name]
    ]
    if edits:
        raise ConversionError(
            f"'{given}' is not as it was written: {'; '.join(edits)}. Save a copy of it, and "
            f"replace it with --accept-changes."
        )


def _refuse_unrecorded(source: Source, given: str | Path, texts: Mapping[str, bytes]) -> None:
    """Raise `ConversionError` for differing code without a digest, as of a trained and saved model."""
    names = [name for name, text in texts.items() if name in source.files and source.path(name).read_bytes() != text]
    if names:
        raise ConversionError(
            f"whether somebody has changed {name_some(tuple(sorted(names)))} of '{given}' is not recorded. Save a "
            f"copy of it, and replace it with --accept-changes."
        )


def _of_others(auto_map, code: set[str]) -> dict:
    """Return the entries of an `auto_map` that name no file of `code`, which somebody has added."""

    def is_ours(entry) -> bool:
        references = entry if isinstance(entry, list) else [entry]
        return any(f"{str(reference).split('.')[0]}.py" in code for reference in references if reference is not None)

    entries = auto_map.items() if isinstance(auto_map, dict) else ()
    return {name: entry for name, entry in entries if not is_ours(entry)}
