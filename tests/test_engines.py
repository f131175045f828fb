"""What `make test-engines` found last is what docs/serving.md says, and nothing differed."""

from .campaigns.engines.page import FIGURES


def test_the_page_says_what_was_found_last():
    assert FIGURES.rendered() == FIGURES.written()
    sharded = FIGURES.written().count("| Llama, DHC×4, trained | tensor parallel, 2 | float32 |")
    assert sharded == 2  # vLLM's and SGLang's


def test_nothing_differed():
    rows = FIGURES.read()["rows"]
    assert len(rows) > 50
    assert all(row["ok"] for row in rows)
