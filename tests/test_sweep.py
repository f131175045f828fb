"""docs/model_types.md, and a sample of the sweep that wrote it."""

import json

import pytest
import transformers

from benchmarks.timing import between_marks
from hf_hyperconn.families import TESTED

from .other_families import RELEASE
from .pages import read
from .sweep import RECORD, TITLES, outcome, tables


@pytest.fixture(scope="module")
def record() -> dict:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def test_the_page_is_what_was_found(record):
    page = read("docs/model_types.md")
    assert between_marks(page, "sweep", tables(record)) == page
    assert {kind for kind, _ in record["outcomes"].values()} == set(TITLES)
    assert record["transformers"] == RELEASE


def test_every_tested_family_was_found_exact(record):
    assert [each for each in TESTED if record["outcomes"][each][0] != "exact"] == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "model_type", ["gptj", "siglip_vision_model", "aimv2_vision_model", "t5", "clip_vision_model"]
)
def test_a_sample_is_as_recorded(model_type, record):
    if transformers.__version__ != RELEASE:
        pytest.skip("another release may have other layers")
    assert list(outcome(model_type)) == record["outcomes"][model_type]
