"""What a long run found last, in `docs/`, and the tables that are made of it."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.timing import with_tables

from ..pages import REPOSITORY


@dataclass(frozen=True)
class Figures:
    """A run's figures and the page that shows them.

    file: of the figures, JSON. page: with the tables; both by their paths in the repository.
    tables: what stands between the page's marks, by their names, from the figures.
    """

    file: str
    page: str
    tables: Callable[[dict], dict[str, str]]

    def read(self) -> dict:
        """Return the last figures."""
        return json.loads((REPOSITORY / self.file).read_text(encoding="utf-8"))

    def written(self) -> str:
        """Return the page as it is."""
        return (REPOSITORY / self.page).read_text(encoding="utf-8")

    def rendered(self) -> str:
        """Return the page, its tables made anew."""
        return with_tables(self.written(), self.tables(self.read()))

    def write(self, figures: dict) -> None:
        """Replace the figures and the page's tables."""
        (REPOSITORY / self.file).write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
        (REPOSITORY / self.page).write_text(self.rendered(), encoding="utf-8")


def named(versions: dict[str, str]) -> str:
    """Return packages and their versions, in words."""
    return ", ".join(f"{name} {version}" for name, version in versions.items())
