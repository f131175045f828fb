"""What the tools did last, and their tables in docs/trainers.md."""

from benchmarks.timing import markdown
from tests.campaigns.figures import Figures, named


def tables(figures: dict) -> dict[str, str]:
    """Return a table for each tool."""
    head = ["", "a conversion is", "first loss"]
    sections = {}
    for tool, found in figures.items():
        rows = [[row["does"], row["verdict"], _loss(row)] for row in found["rows"]]
        sections[tool] = f"{named(found['versions'])}.\n\n{markdown(head, rows)}"
    return sections


def _loss(row: dict) -> str:
    return f"{row['first_loss']:.4f}" if "first_loss" in row else ""


FIGURES = Figures("docs/trainers.json", "docs/trainers.md", tables)
