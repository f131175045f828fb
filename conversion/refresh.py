"""The code of an older folder brought to this release, with its weights untouched."""

import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import hf_hyperconn
from hf_hyperconn.errors import ConversionError
from hf_hyperconn.kinds import FORMAT
from hf_hyperconn.pairs.source_files import release

from .changes import find_changes
from .checkpoint import read_config, read_written_config, refuse_links_out
from .files import keep_mode, make_folder, replace_file
from .hyper_config import family_of
from .made import MARK, Contents, Listing, folders_in, is_regular, listing
from .model_code import code_of, written_by
from .mounts import mount_in
from .moving import held, holds, put_in_place, remove_rest, rename_new
from .place import Place, is_around_us, leftover_of
from .reading import read_json
from .record import read_record
from .source import CONFIG, RECORD, LocalSource
from .transfer import copy_anew, digest


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


def refresh(
    folder: str | Path,
    *,
    dry_run: bool = False,
    accept_changes: bool = False,
    say: Callable[[str], None] = lambda line: None,
) -> Refreshed:
    """Write the code of this release into the folder of a hyper-connection checkpoint, all of it or nothing.

    A folder with the new code and the same other files, by hard links, takes the old one's place at once. A comparison
    with the base that was recorded goes from the record, because it was of the code as it was. What a refresh that was
    cut off has left is completed or removed.

    dry_run: only say what would change.
    accept_changes: whether code that differs from what was written, and which would be lost, is replaced too.
    say: called with a line for what should be known besides.

    Raises `UnsupportedCheckpointError` when the folder is no hyper-connection checkpoint that this release can read,
    and `ConversionError` when it can't be refreshed, also because another refresh or a conversion is at work on it.
    """
    place = Place(Path(os.path.realpath(folder)))
    try:
        _find(place, folder, dry_run)
        with nullcontext() if dry_run else _hold(place.out):
            if not dry_run:
                _end(place)
            return _refresh(place, folder, dry_run, accept_changes, say)
    except OSError as error:
        raise ConversionError(
            f"'{folder}' is as it was: {error.strerror or error}. Fix that, and run the same command again."
        ) from error


def _refresh(
    place: Place, given: str | Path, dry_run: bool, accept_changes: bool, say: Callable[[str], None]
) -> Refreshed:
    """Refresh the folder `place.out`, which is locked unless nothing is to change; arguments as for `refresh`."""
    files = listing(place.out)
    source = LocalSource(place.out)
    config, record = read_config(source), read_record(source)
    refuse_links_out(source, code_of(source, config))
    family = family_of(source, config)
    texts = {name: text.encode() for name, text in family.code(config).items()}
    old = {name for name in code_of(source, config) if name in source.files}
    removed = (old - texts.keys()) & ((record or {}).get("files") or {}).keys()
    if not accept_changes:
        _refuse_edited(source, config, record, given, kept=old - texts.keys() - removed)
    written = read_written_config(source)
    new_config = {
        **written,
        "auto_map": {**_of_others(written.get("auto_map"), {*texts, *removed}), **family.auto_map},
        "hc_format": FORMAT,
        "hc_version": hf_hyperconn.__version__,
    }
    found = Refreshed(
        written_by(config, record),
        (hf_hyperconn.__version__, release()),
        tuple(sorted(name for name in old & texts.keys() if source.path(name).read_bytes() != texts[name])),
        tuple(sorted(texts.keys() - old)),
        tuple(sorted(removed)),
        new_config != written,
        bool((record or {}).get("verification")),
    )
    if not dry_run and not found.is_current:
        _refuse_unmovable(place.out, given)
        replaced = Contents(files, ())
        place = Place(place.out, replaced, leftover_of(place, replaced))
        modes = {name: (place.out / name).stat().st_mode for name in ("", *folders_in(place.out))}
        with _workspace(place):
            _make(place, found, texts, new_config, record)
            put_in_place(place, is_locked=True)
            if os.path.lexists(place.previous):
                say(f"warning       '{place.previous}' is still there; remove it if you don't need it.")
            else:
                _unmark(place)
            for name, mode in modes.items():
                _protect(place.out / name, mode)
    return found


def _protect(folder: Path, mode: int) -> None:
    """Take from a folder what its owner may not do by `mode`, and what it took to fill it."""
    if ~mode & 0o700:
        with suppress(OSError):
            folder.chmod(stat.S_IMODE(folder.stat().st_mode) & (0o7077 | mode))


def _find(place: Place, given: str | Path, dry_run: bool) -> None:
    """Refuse a folder that is not there, unless a refresh that was cut off has moved it aside: then it comes back."""
    if place.out.is_dir() or (not dry_run and _bring_back(place)) or place.out.is_dir():
        return
    hint = f" What it was is '{place.previous}': rename it back." if place.previous.is_dir() else ""
    if _is_aside(place):
        hint = " A refresh of it was cut off, and without --dry-run the same command completes it."
    raise ConversionError(f"there is no folder '{given}'.{hint}")


def _bring_back(place: Place) -> bool:
    """Rename what a refresh that was cut off has moved aside; whether there was such a folder."""
    try:
        with held(place.previous):
            if not _is_aside(place):
                return False
            rename_new(place.previous, place.out)
            return True
    except (FileNotFoundError, NotADirectoryError):
        return False


def _is_aside(place: Place) -> bool:
    """Whether a refresh has moved aside what was at OUT, and nothing is there yet."""
    files = _marked(place.work)
    return files is not None and not os.path.lexists(place.out) and holds(place.previous, Contents(files, ()))


def _hold(out: Path) -> ExitStack:
    """Keep others from the folder that has the name OUT, even if it was given that name this instant."""
    while True:
        try:
            return held(out)
        except FileNotFoundError:
            if not out.is_dir():
                raise


def _end(place: Place) -> None:
    """Remove what a refresh that gave OUT its name, and was cut off then, has left: the old folder, and the mark."""
    if not is_regular(place.out / MARK):
        return
    if (files := _marked(place.out)) is not None:
        remove_rest(place.previous, files)
    _unmark(place)


def _unmark(place: Place) -> None:
    """Remove the mark from OUT, unless it can't be: it does no harm there."""
    with suppress(OSError):
        (place.out / MARK).unlink()


def _marked(folder: Path) -> Listing | None:
    """The files that were at OUT, by the mark in what a refresh has finished; None of any other folder."""
    try:
        return {name: tuple(status) for name, status in read_json(folder / MARK)["replaces"].items()}
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None


def _refuse_unmovable(out: Path, given: str | Path) -> None:
    """Raise `ConversionError` for a folder that another can't take the place of."""
    if is_around_us(out):
        raise ConversionError(
            f"'{given}' is the current folder, or contains it, and another takes its place. Go to a folder outside of "
            f"it, and run the same command there."
        )
    if mount := mount_in(out):
        raise ConversionError(
            f"'{mount}' is a mount point, and can't be replaced. Unmount it, or copy the model to a folder without "
            f"one, and refresh that."
        )


def _refuse_edited(source: LocalSource, config: dict, record: dict | None, given: str | Path, kept: set[str]) -> None:
    """Raise `ConversionError` when code is not what was written, so that somebody's change would be lost."""
    changes, _ = find_changes(
        source, config, record, as_converted=False, digest_of=lambda name: digest(source.path(name))
    )
    if found := [str(change) for change in changes if change.name not in kept]:
        raise ConversionError(
            f"'{given}' is not as it was written: {'; '.join(found)}. Save what you need of it, and "
            f"replace it with --accept-changes."
        )


def _of_others(auto_map, code: set[str]) -> dict:
    """The entries of an `auto_map` that name no file of `code`: somebody's own, who added it."""
    entries = auto_map.items() if isinstance(auto_map, dict) else ()
    return {name: reference for name, reference in entries if not _is_in(reference, code)}


def _is_in(reference, code: set[str]) -> bool:
    references = reference if isinstance(reference, list) else [reference]
    return any(f"{str(each).split('.')[0]}.py" in code for each in references if each is not None)


@contextmanager
def _workspace(place: Place) -> Iterator[None]:
    """The folder to work in, made anew, marked, and kept from others.

    Raises `ConversionError` when a conversion is at work or unfinished there, or what is there is something else.
    """
    _clear(place)
    try:
        make_folder(place.work, like=place.out)
    except FileExistsError as error:
        raise _in_the_way(place) from error
    with held(place.work):
        if os.listdir(place.work):  # of a conversion that took it before we held it
            raise _in_the_way(place)
        (place.work / MARK).touch()
        keep_mode(place.work, like=place.out)
        yield


def _clear(place: Place) -> None:
    """Remove the folder in which a refresh that was cut off has worked: links, whose files are in OUT itself."""
    try:
        with held(place.work):
            paths = sorted(place.work.iterdir(), key=lambda path: path.name == MARK)
            if paths and not is_regular(place.work / MARK):
                raise _in_the_way(place)
            for path in paths:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
            place.work.rmdir()
    except FileNotFoundError:
        return
    except NotADirectoryError as error:
        raise _in_the_way(place) from error


def _in_the_way(place: Place) -> ConversionError:
    return ConversionError(f"'{place.work}' is in the way: an unfinished conversion. Finish it, or remove it.")


def _make(place: Place, found: Refreshed, texts: dict[str, bytes], config: dict, record: dict | None) -> None:
    """Make the new folder beside the old one, in the one for it, and note in its mark that it is finished."""
    written = {*texts, *found.removed, CONFIG, *([RECORD] if record else [])}
    assert place.replaced is not None
    kept = [name for name in place.replaced.files if name not in written]
    _link(place, kept)
    for name, content in texts.items():
        replace_file(place.work / name, content)
    replace_file(place.work / CONFIG, _json(config))
    if record:
        new_record = {name: value for name, value in record.items() if name != "verification"}
        new_record["versions"] = {
            **(new_record.get("versions") or {}),
            **dict(zip(("hf_hyperconn", "transformers"), found.now, strict=True)),
        }
        if files := new_record.get("files"):
            others = {name: value for name, value in files.items() if name not in {*texts, *found.removed}}
            as_made = digest(place.out / CONFIG) == files.get(CONFIG)  # else it stays known for changed
            own = {name: digest(place.work / name) for name in (*texts, *([CONFIG] if as_made else []))}
            new_record["files"] = dict(sorted((others | own).items()))
        replace_file(place.work / RECORD, _json(new_record))
    _check_complete(place, kept, written - {*found.removed})
    replace_file(place.work / MARK, _json({"replaces": place.replaced.files}))


def _check_complete(place: Place, kept: Iterable[str], written: set[str]) -> None:
    """Raise `ConversionError` unless the new folder holds the files that it should, those of the old one in full."""
    assert place.replaced is not None
    old, new = place.replaced.files, listing(place.work)
    if new.keys() != {*kept, *written} or any(new[name][1] != old[name][1] for name in kept):
        raise ConversionError(f"'{place.work}' was changed by others, and '{place.out}' stays. Run this again.")


def _link(place: Place, names: Iterable[str]) -> None:
    """Give the new folder the files of the old one, as links to the same bytes or, where there are none, copies."""
    for name in folders_in(place.out):
        make_folder(place.work / name, like=place.out / name)
        keep_mode(place.work / name, like=place.out / name)
    for name in names:
        old, new = place.out / name, place.work / name
        if old.is_symlink():
            new.symlink_to(os.readlink(old))
            continue
        try:
            os.link(old, new, follow_symlinks=False)
        except OSError:
            copy_anew(old, new)


def _json(content: dict) -> bytes:
    return (json.dumps(content, indent=2) + "\n").encode()
