"""Every family, started from the history or converted to attention residuals, equals its base."""

from pathlib import Path

import pytest
import torch

from hf_hyperconn import convert_model
from hf_hyperconn.conversion.convert import convert_checkpoint

from .conftest import asked_for
from .families import FAMILIES
from .marks import few, tail
from .test_families import DTYPES, PROMPTS, compared
from .test_history_conversions import CASES, FAST, REST, SLOW
from .tiny import tiny

families = pytest.mark.parametrize("model_type", FAMILIES)
# norms before a branch, after it and both, joined projections, two kinds of mixtures: the forms of the other families
OF_EACH_FORM = ("llama", "olmo2", "gemma2", "phi3", "olmoe", "gpt_oss")


@families
@pytest.mark.parametrize("cases", few((FAST, SLOW, REST), FAST, tail=[REST]), ids=["fast", "slow", "rest"])
@torch.no_grad()
def test_in_memory(cases, model_type):
    base, ids = tiny(model_type).eval(), torch.tensor(PROMPTS)
    expected = base(ids, output_hidden_states=True)
    for fields in cases.values():
        outputs = convert_model(base, **fields).eval()(ids, output_hidden_states=True)
        assert torch.equal(outputs.logits, expected.logits)
        assert all(map(torch.equal, outputs.hidden_states, expected.hidden_states))


@pytest.fixture(scope="module")
def saved_types(request) -> list[str]:
    """The families that the selected tests want on disk."""
    selected = asked_for(request, "saved_type")
    return [model_type for model_type in FAMILIES if model_type in selected]


@pytest.fixture(scope="module")
def place(saved_types, tmp_path_factory) -> Path:
    """A family's base and its conversions, `<model type>/base`, `<model type>/<case>`."""
    place = tmp_path_factory.mktemp("families")
    for model_type in saved_types:
        base = place / model_type / "base"
        tiny(model_type).save_pretrained(base)
        for name, fields in CASES.items():
            convert_checkpoint(str(base), base.with_name(name), verify="structure", **fields)
    return place


@pytest.fixture(scope="module")
def differing(saved_types, place) -> dict[str, list[str]]:
    return compared(place, saved_types, new_tokens=4)


@pytest.mark.slow
@pytest.mark.parametrize(
    "saved_type", [*OF_EACH_FORM, *tail(*(name for name in FAMILIES if name not in OF_EACH_FORM))]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_to_the_base_without_the_package(saved_type, dtype, place, differing):
    differences = {name: differing[f"{place / saved_type / name} {dtype} None"] for name in CASES}
    assert differences == dict.fromkeys(CASES, [])
