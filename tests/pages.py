"""What the README and the pages of `docs/` show."""

import re
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]


def snippets(page: str) -> list[tuple[str, str]]:
    """Language and text of every block of code on a page, given by its path in the repository."""
    text = (REPOSITORY / page).read_text(encoding="utf-8")
    return re.findall(r"^```(\w*)\n(.*?)^```", text, re.M | re.S)
