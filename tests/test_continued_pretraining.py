"""docs/training.md says what the run gave."""

import json

from benchmarks import continued_pretraining


def test_the_table_is_that_of_the_results():
    page = continued_pretraining.DOCS.read_text(encoding="utf-8")
    assert "| difference |" in page
    assert continued_pretraining.render(page) == page


def test_models_start_from_one_checkpoint():
    """Base and conversion have the same held-out loss before the first step, to all digits written."""
    runs = json.loads((continued_pretraining.RESULTS / continued_pretraining.NAME).read_text())["runs"]
    assert len({run["held_out"][0][1] for run in runs}) == 1
    assert {run["held_out"][0][0] for run in runs} == {0}
    assert len(runs) == 2 * len({run["seed"] for run in runs}) >= 4
