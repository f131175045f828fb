"""What `make test-engines` found last is what docs/serving.md says, and nothing differed."""

import json

from .engines.page import FIGURES, PAGE, render


def test_the_page_says_what_was_found_last():
    page = PAGE.read_text(encoding="utf-8")
    assert render(page) == page
    assert page.count("| Llama, DHC×4, trained | tensor parallel, 2 | float32 |") == 2  # vLLM's and SGLang's


def test_nothing_differed():
    rows = json.loads(FIGURES.read_text(encoding="utf-8"))["rows"]
    assert len(rows) > 50
    assert all(row["ok"] for row in rows)
