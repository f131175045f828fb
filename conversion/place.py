"""Where a conversion goes, decided before anything is written: not over its source, nor over what is no conversion."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from hf_hyperconn.errors import ConversionError

from .made import Contents, contents_of, listing
from .mounts import mount_in
from .source import CONFIG, RECORD, Source, check_is_text

LONGEST_NAME = 255  # bytes, on the file systems there are
NAMED = 3  # files that a message names before it counts


@dataclass(frozen=True)
class Place:
    """Where a conversion goes.

    out: the folder to make, without links in its path.
    replaced: what is there now, and goes when the new one is complete.
    leftover: what is in `previous` because an earlier replacement was cut off, and goes too.
    """

    out: Path
    replaced: Contents | None = None
    leftover: Contents | None = None

    @property
    def work(self) -> Path:
        """The folder beside `out` in which a conversion works until it is complete."""
        return self.out.with_name(f".{self.out.name}.incomplete")

    @property
    def previous(self) -> Path:
        """The folder beside `out` that holds what is replaced until the new one has its name."""
        return self.out.with_name(f".{self.out.name}.previous")


def find_place(out: Path, source: Source, names: Iterable[str], *, force: bool, discard: bool) -> Place:
    """Where a conversion of `source` to OUT goes.

    out: as the user gave it. A link stands for the folder that it leads to, whether that is there or not.
    names: files of the source that are needed.
    force: whether a conversion there is replaced.
    discard: with what no conversion made, too.

    Raises `ConversionError` when it can't go there, or something would be lost.
    """
    try:
        place = Place(Path(os.path.realpath(out)))
        _check_name(out, place.out)
        _check_source(out, place, source, names)
        replaced = _replaced(out, place.out, force, discard) if os.path.lexists(place.out) else None
        _check_parent(place.out)
        leftover = leftover_of(place, replaced) if force else None
        return Place(place.out, replaced, leftover)
    except OSError as error:
        raise ConversionError(f"'{out}' can't be read: {error.strerror or error}. Choose another OUT.") from error


def _check_name(out: Path, real: Path) -> None:
    check_is_text(str(real))
    if (length := len(f".{real.name}.incomplete".encode())) > LONGEST_NAME:
        raise ConversionError(
            f"the name {real.name!r:.60} is too long: the conversion works in a folder of {length} bytes' name, and "
            f"{LONGEST_NAME} are allowed. Choose another OUT."
        )
    if is_around_us(real):
        raise ConversionError(f"'{out}' is the current folder, or contains it. Give a folder to create.")
    if real.is_symlink():
        raise ConversionError(f"'{out}' is a link that leads to itself. Remove it, or choose another OUT.")
    if mount := mount_in(real):
        raise ConversionError(f"'{mount}' is a mount point, and can't be replaced. Choose another OUT.")


def _check_source(out: Path, place: Place, source: Source, names: Iterable[str]) -> None:
    """Refuse a source of which anything lies where a conversion works or what is there may be removed."""
    folder = source.folder([CONFIG])
    homes = {Path(os.path.realpath(folder)), *(Path(os.path.realpath(folder / name)).parent for name in names)}
    for taken in (place.out, place.work, place.previous):
        if taken.is_dir() and any(
            within.is_dir() and taken.samefile(within) for home in homes for within in _with_parents(home)
        ):
            raise ConversionError(
                f"files of {source.name!r} lie in '{taken}', which a conversion to '{out}' would replace. Choose "
                f"another OUT."
            )


def _replaced(out: Path, real: Path, force: bool, discard: bool) -> Contents:
    if not force:
        raise ConversionError(f"'{out}' already exists. Choose another OUT, or replace it with --force.")
    contents = contents_of(real)
    if contents is None:
        raise ConversionError(
            f"'{out}' is not a converted checkpoint (no {RECORD} as the converter writes it), so --force does not "
            f"replace it. Remove it."
        )
    if contents.others and not discard:
        raise ConversionError(
            f"'{out}' also contains {_of_others(contents)}. Save what you need, then add --discard to remove these "
            f"with it, or choose another OUT."
        )
    return contents


def _of_others(contents: Contents) -> str:
    """What of a conversion would be lost, for people."""
    found = []
    if names := contents.not_made:
        found.append(f"files that the conversion did not write or that have changed since: {named(names)}")
    if names := contents.not_known:
        found.append(f"base weights that may have changed, as no digest was recorded of them: {named(names)}")
    return "; ".join(found)


def leftover_of(place: Place, replaced: Contents | None) -> Contents | None:
    """What an earlier replacement left, if it left anything.

    Raises `ConversionError` when what is there can't be of a replacement, and `replaced` is to be kept there. When
    there is nothing to keep, it stays as it is, also when it is not known whether all of it is of a conversion: beside
    an OUT it is what that has replaced.
    """
    if not os.path.lexists(place.previous):
        return None
    is_folder = place.previous.is_dir() and not place.previous.is_symlink()
    if is_folder and not listing(place.previous):
        return Contents({}, ())
    contents = contents_of(place.previous)
    if contents is not None and not (contents.not_made if replaced else contents.others):
        return contents
    if replaced is None:
        return None
    raise ConversionError(
        f"'{place.previous}' is in the way: the old '{place.out.name}' is kept there until the new one is complete. "
        f"Rename it, or remove it."
    )


def _check_parent(real: Path) -> None:
    if not real.parent.is_dir():
        raise ConversionError(f"there is no folder '{real.parent}' to write '{real.name}' in. Create it first.")
    if not os.access(real.parent, os.W_OK | os.X_OK):
        raise ConversionError(f"no permission to write in '{real.parent}'. Choose another OUT.")


def named(names: tuple[str, ...]) -> str:
    """The first of some files for people, and how many more there are."""
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def is_around_us(folder: Path) -> bool:
    """Whether a folder is the current one, or contains it."""
    return folder.exists() and any(folder.samefile(within) for within in _with_parents(Path.cwd()))


def _with_parents(folder: Path) -> tuple[Path, ...]:
    return folder, *folder.parents
