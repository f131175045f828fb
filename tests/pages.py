"""What the README and the pages of `docs/` show."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def pages() -> list[str]:
    """Return the README and every page of `docs/`, by their paths in the repository."""
    return ["README.md", *sorted(path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob("docs/*.md"))]


def read(page: str) -> str:
    """Return the text of a page, given by its path in the repository."""
    return (REPOSITORY / page).read_text(encoding="utf-8")


def snippets(page: str) -> list[tuple[str, str]]:
    """Return language and text of every block of code on a page, given by its path in the repository."""
    return re.findall(r"^```(\w*)\n(.*?)^```", read(page), re.M | re.S)
