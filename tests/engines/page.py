"""What the engines answered last, docs/engines.json, and its tables in docs/serving.md."""

import json

from benchmarks.timing import between_marks, markdown
from tests.pages import REPOSITORY

FIGURES, PAGE = REPOSITORY / "docs" / "engines.json", REPOSITORY / "docs" / "serving.md"


def write(figures: dict) -> None:
    """Replace the figures and the page's tables."""
    FIGURES.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    PAGE.write_text(render(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def render(page: str) -> str:
    """The page, its tables made anew: one for each engine."""
    figures = json.loads(FIGURES.read_text(encoding="utf-8"))
    head = ["", "", "dtype", "answers", "log-probabilities, from those of `generate` in float32"]
    for engine, versions in figures["versions"].items():
        table = markdown(head, [_row(row) for row in figures["rows"] if row["engine"] == engine])
        named = ", ".join(f"{name} {version}" for name, version in versions.items())
        page = between_marks(page, engine, f"{named}.\n\n{table}")
    return page


def _row(row: dict) -> list[str]:
    name = f"{row['base']}, {row['connection'] or 'the base itself'}{', trained' * row['trained']}"
    if "error" in row:
        return [name, row["does"], row["dtype"], "none", ""]
    answers = "those of `generate`" if row["tokens"] else "differ by rounding"
    if "equal_to_base" in row:
        answers = "the base's, bit for bit" if row["equal_to_base"] else "other than the base's"
    return [name, row["does"], row["dtype"], answers, f"within {row['distance']:.1g}"]
