"""The record of docs/model_types.md, and a sample of the sweep that wrote it."""

import pytest
import transformers

from .campaigns.sweep import FIGURES, TITLES, outcomes
from .other_families import RELEASE
from .pages import read
from .tested import TESTED

# a form that converts, one that is refused, a decoder with another name on disk, a config read from `self.config`
SAMPLE = ("gptj", "bert", "cohere_asr", "xclip")
REST = ("siglip_vision_model", "aimv2_vision_model", "clip_vision_model", "llava", "moshi", "dbrx")


@pytest.fixture(scope="module")
def record() -> dict:
    return FIGURES.read()


def test_every_kind_of_outcome_was_found(record):
    assert {kind for kind, _ in record["outcomes"].values()} == set(TITLES)
    assert record["transformers"] == RELEASE


def test_every_tested_family_was_found_exact(record):
    assert [name for name in TESTED if record["outcomes"][name][0] != "exact"] == []


def test_the_readme_says_how_many_are_exact(record):
    count = sum(kind == "exact" for kind, _ in record["outcomes"].values())
    assert f"[{count} model types](docs/model_types.md)" in read("README.md")
    assert f"{count} model types convert exactly, and {len(TESTED)} of them " in " ".join(read("CHANGELOG.md").split())


@pytest.mark.slow
@pytest.mark.parametrize("model_types", [SAMPLE, pytest.param(REST, marks=pytest.mark.tail)], ids=["sample", "rest"])
def test_a_sample_is_as_recorded(model_types, record):
    if transformers.__version__ != RELEASE:
        pytest.skip("another release may have other layers")
    actual = {model_type: list(outcome) for model_type, outcome in outcomes(list(model_types)).items()}
    assert actual == {model_type: record["outcomes"][model_type] for model_type in model_types}
