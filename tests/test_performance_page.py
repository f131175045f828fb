"""docs/performance.md says what was measured."""

import json

from benchmarks import performance


def test_tables_are_those_of_the_results():
    """The page's tables are what the committed results give."""
    page = performance.DOCS.read_text(encoding="utf-8")
    assert "ms (" in page
    assert performance.render(page) == page


def test_figures_of_the_text():
    """The README's factors of kept memory are those measured."""
    rows = json.loads((performance.RESULTS / "models.json").read_text())["rows"]
    kept = {row["case"]: row["memory"]["a_layer"] for row in rows}
    assert abs(kept["HC"] / kept["plain"] - 1.25) < 0.02
    assert abs(kept["HC by autograd"] / kept["plain"] - 2.4) < 0.05
