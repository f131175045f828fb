"""docs/performance.md and docs/serving.md say what was measured."""

from benchmarks import performance


def test_tables_are_those_of_the_results():
    """The pages' tables are what the committed results give."""
    page, serving = (path.read_text(encoding="utf-8") for path in performance.PAGES)
    assert "<!-- overhead -->" in page
    assert "ms (" in page
    assert performance.render(page) == page
    assert "<!-- exports -->" in serving
    assert performance.render(serving) == serving
