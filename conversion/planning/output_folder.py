"""The folder OUT of a conversion: why it is refused, its workspace and its renaming."""

import os
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import datetime
from itertools import count
from pathlib import Path

from hf_hyperconn.errors import ConversionError

from ..checkpoint.source import CONFIG, Source, check_is_text
from ..files.writing import lock

LONGEST_NAME = 255  # bytes, on the file systems there are
LONGEST_SUFFIX = len(".replaced-20260101-000000-99")


@dataclass(frozen=True)
class OutputFolder:
    """The place of a conversion.

    path: the folder to make, without links in its path.
    is_replaced: whether something exists at the path, and will be renamed.
    """

    path: Path
    is_replaced: bool = False

    @property
    def work(self) -> Path:
        """Return the folder beside `path` in which a conversion works until it is complete."""
        return self.path.with_name(f".{self.path.name}.incomplete")

    def refuse_newcomer(self) -> None:
        """Raise `ConversionError` when something has appeared at `path` since the conversion was planned."""
        if not self.is_replaced and os.path.lexists(self.path):
            raise ConversionError(
                f"'{self.path}' has appeared meanwhile and is not replaced. Move it away and run the same command "
                f"again, which continues from '{self.work}'."
            )

    def publish(self) -> Path | None:
        """Rename `work` to `path`, and an old `path` to a name with the time. Nothing is deleted.

        Returns the new name of the old folder. When renaming fails, everything keeps its name.

        Raises `ConversionError`, also when another command works in the old folder, and `OSError`.
        """
        self.refuse_newcomer()
        with lock(self.path) if self.path.is_dir() else nullcontext():
            return self._rename()

    def _rename(self) -> Path | None:
        aside = None
        try:
            if self.is_replaced and os.path.lexists(self.path):
                aside = self._free_name()
                os.rename(self.path, aside)
            os.rename(self.work, self.path)
        except BaseException:
            if aside is not None and os.path.lexists(aside) and not os.path.lexists(self.path):
                os.rename(aside, self.path)
            raise
        return aside

    def _free_name(self) -> Path:
        stem = f"{self.path.name}.replaced-{datetime.now():%Y%m%d-%H%M%S}"
        names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
        return next(path for name in names if not os.path.lexists(path := self.path.with_name(name)))


def plan_output_folder(out: Path, source: Source, names: Iterable[str], *, force: bool) -> OutputFolder:
    """Decide the place of a conversion of `source` to OUT.

    out: as the user gave it. A link stands for its target, whether the target exists or not.
    names: files of the source that are needed.
    force: whether an OUT that exists may be renamed.

    Raises `ConversionError` when the conversion can't have this place.
    """
    try:
        path = Path(os.path.realpath(out))
        _check_name(out, path)
        folder = OutputFolder(path, is_replaced=os.path.lexists(path))
        _check_source(out, folder, source, names)
        if folder.is_replaced and not force:
            raise ConversionError(f"'{out}' already exists. Choose another OUT, or rename the old one by --force.")
        if not path.parent.is_dir():
            raise ConversionError(
                f"there is no folder '{path.parent}' to write '{path.name}' in. Create it, or choose another OUT."
            )
        if not os.access(path.parent, os.W_OK | os.X_OK):
            raise ConversionError(f"no permission to write in '{path.parent}'. Choose another OUT.")
        return folder
    except OSError as error:
        raise ConversionError(f"'{out}' can't be read: {error.strerror or error}. Choose another OUT.") from error


def _check_name(out: Path, path: Path) -> None:
    check_is_text(str(path))
    if (length := len(path.name.encode()) + LONGEST_SUFFIX) > LONGEST_NAME:
        raise ConversionError(
            f"the name {path.name!r:.60} is too long: folders beside it have names of up to {length} bytes, and "
            f"{LONGEST_NAME} are allowed. Choose another OUT."
        )
    if path.exists() and any(path.samefile(around) for around in _with_parents(Path.cwd())):
        raise ConversionError(f"'{out}' is the current folder, or contains it. Give a folder to create.")
    if path.is_symlink():
        raise ConversionError(f"'{out}' is a link that leads to itself. Remove it, or choose another OUT.")
    if os.path.ismount(path):
        raise ConversionError(f"'{out}' is a mount point, and can't be renamed. Choose another OUT.")


def _check_source(out: Path, folder: OutputFolder, source: Source, names: Iterable[str]) -> None:
    """Refuse a source within the workspace, or within a folder that would be renamed."""
    home = source.folder([CONFIG])
    homes = {Path(os.path.realpath(home)), *(Path(os.path.realpath(home / name)).parent for name in names)}
    around = {parent for home in homes for parent in _with_parents(home) if parent.is_dir()}
    for taken in (folder.path, folder.work):
        if taken.is_dir() and any(map(taken.samefile, around)):
            raise ConversionError(
                f"files of {source.name!r} lie in '{taken}', which a conversion to '{out}' would replace. Choose "
                f"another OUT."
            )


def _with_parents(folder: Path) -> tuple[Path, ...]:
    return folder, *folder.parents
