"""What the engines answered last, and its tables in docs/serving.md."""

from benchmarks.timing import markdown
from tests.campaigns.figures import Figures, named


def tables(figures: dict) -> dict[str, str]:
    """Return a table for each engine."""
    head = ["", "", "dtype", "answers", "log-probabilities, from those of `generate` in float32"]
    sections = {}
    for engine, versions in figures["versions"].items():
        table = markdown(head, [_row(row) for row in figures["rows"] if row["engine"] == engine])
        sections[engine] = f"{named(versions)}.\n\n{table}"
    return sections


def _row(row: dict) -> list[str]:
    name = f"{row['base']}, {row['connection'] or 'the base itself'}{', trained' * row['trained']}"
    if "error" in row:
        return [name, row["does"], row["dtype"], "none", ""]
    answers = "those of `generate`" if row["tokens"] else "differ by rounding"
    if "equal_to_base" in row:
        answers = "the base's, bit for bit" if row["equal_to_base"] else "other than the base's"
    return [name, row["does"], row["dtype"], answers, f"within {row['distance']:.1g}"]


FIGURES = Figures("docs/engines.json", "docs/serving.md", tables)
