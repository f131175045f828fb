"""The code of an older folder brought to this release, with its weights untouched."""

import json
import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import hf_hyperconn
from hf_hyperconn.errors import ConversionError
from hf_hyperconn.kinds import FORMAT
from hf_hyperconn.pairs.modules import code_text
from hf_hyperconn.pairs.source_files import release

from .changes import find_changes
from .checkpoint import read_config, read_written_config
from .files import make_folder, replace_file
from .hyper_config import family_of
from .made import Contents, is_regular, listing
from .model_code import code_of, written_by
from .moving import put_in_place
from .place import Place
from .record import read_record
from .source import CONFIG, RECORD, LocalSource
from .transfer import copy_anew, digest

MARK = ".hyperconn_refresh"  # in the folder that takes the old one's place, until it is complete


@dataclass(frozen=True)
class Refreshed:
    """What a refresh changes, or has changed.

    written_by, now: the releases of hf_hyperconn and Transformers that wrote the code, and that write it now.
    changed, added, removed: files of model code.
    has_new_config: whether config.json names other classes, or another format or release.
    forgets_verification: whether a recorded comparison with the base goes, which was of the code as it was.
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
        """Whether there is nothing to do."""
        return not (self.changed or self.added or self.removed or self.has_new_config)

    def lines(self) -> list[str]:
        """The summary for people."""
        package, transformers = (each or "unknown" for each in self.written_by)
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
        """The summary for machines."""
        return {**asdict(self), "is_current": self.is_current}


def refresh(folder: str | Path, *, dry_run: bool = False, accept_changes: bool = False) -> Refreshed:
    """Write the code of this release into the folder of a hyper-connection checkpoint, all of it or nothing.

    A folder with the new code and the same other files, by hard links, takes the old one's place at once. A comparison
    with the base that was recorded goes from the record, because it was of the code as it was.

    dry_run: only say what would change.
    accept_changes: whether code that differs from what was written, and which would be lost, is replaced too.

    Raises `UnsupportedCheckpointError` when the folder is no hyper-connection checkpoint that this release can read,
    and `ConversionError` when it can't be refreshed.
    """
    given, out = folder, Path(os.path.realpath(folder))
    place = Place(out)
    if not out.is_dir():
        hint = f" What it was is '{place.previous}': rename it back." if place.previous.is_dir() else ""
        raise ConversionError(f"there is no folder '{given}'.{hint}")
    try:
        place = Place(out, Contents(listing(out), ()))
        source = LocalSource(out)
        config, record = read_config(source), read_record(source)
        family = family_of(source, config)
        if not accept_changes:
            _refuse_edited(source, config, record, given)
        texts = {name: code_text(name).encode() for name in family.code}
        old = {name for name in code_of(source, config) if name in source.files}
        written = read_written_config(source)
        new_config = {
            **written,
            "auto_map": family.auto_map,
            "hc_format": FORMAT,
            "hc_version": hf_hyperconn.__version__,
        }
        found = Refreshed(
            written_by(config, record),
            (hf_hyperconn.__version__, release()),
            tuple(sorted(name for name in old & texts.keys() if source.path(name).read_bytes() != texts[name])),
            tuple(sorted(texts.keys() - old)),
            tuple(sorted(old - texts.keys())),
            new_config != written,
            bool((record or {}).get("verification")),
        )
        if not dry_run and not found.is_current:
            _make(place, found, texts, new_config, record)
            put_in_place(place)
        return found
    except OSError as error:
        raise ConversionError(
            f"'{given}' is as it was: {error.strerror or error}. Fix that, and run the same command again."
        ) from error


def _refuse_edited(source: LocalSource, config: dict, record: dict | None, given: str | Path) -> None:
    """Raise `ConversionError` when code is not what was written, so that somebody's change would be lost."""
    changes, _ = find_changes(
        source, config, record, as_converted=False, digest_of=lambda name: digest(source.path(name))
    )
    if changes:
        raise ConversionError(
            f"'{given}' is not as it was written: {'; '.join(map(str, changes))}. Save what you need of it, and "
            f"replace it with --accept-changes."
        )


def _make(place: Place, found: Refreshed, texts: dict[str, bytes], config: dict, record: dict | None) -> None:
    """Make the new folder beside the old one."""
    if os.path.lexists(place.work):
        if not is_regular(place.work / MARK):
            raise ConversionError(f"'{place.work}' is in the way: an unfinished conversion. Finish it, or remove it.")
        shutil.rmtree(place.work)  # of a refresh that was cut off: links, whose files are in the folder itself
    make_folder(place.work, like=place.out)
    (place.work / MARK).touch()
    written = {*texts, *found.removed, CONFIG, *([RECORD] if record else [])}
    assert place.replaced is not None
    _link(place, (name for name in place.replaced.files if name not in written))
    for name, content in texts.items():
        replace_file(place.work / name, content)
    replace_file(place.work / CONFIG, _json(config))
    if record:
        kept = {name: value for name, value in record.items() if name != "verification"}
        kept["versions"] = {
            **kept.get("versions", {}),
            **dict(zip(("hf_hyperconn", "transformers"), found.now, strict=True)),
        }
        if files := kept.get("files"):
            others = {name: value for name, value in files.items() if name not in {*texts, *found.removed, CONFIG}}
            own = {name: digest(place.work / name) for name in (*texts, CONFIG)}
            kept["files"] = dict(sorted((others | own).items()))
        replace_file(place.work / RECORD, _json(kept))
    (place.work / MARK).unlink()


def _link(place: Place, names: Iterable[str]) -> None:
    """Give the new folder the files of the old one, as links to the same bytes or, where there are none, copies."""
    for name in names:
        old, new = place.out / name, place.work / name
        for folder in reversed(Path(name).parents[:-1]):
            if not (place.work / folder).is_dir():
                make_folder(place.work / folder, like=place.out / folder)
        if old.is_symlink():
            new.symlink_to(os.readlink(old))
            continue
        try:
            os.link(old, new, follow_symlinks=False)
        except OSError:
            copy_anew(old, new)


def _json(content: dict) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
