"""The table of support in docs/families.md is that of the code, and every cell of it holds."""

import copy

import pytest
import torch

import hf_hyperconn
from hf_hyperconn import convert_model
from hf_hyperconn.kinds import CONVERTIBLE

from .conftest import train
from .families import FAMILIES, FIELDS
from .other_families import inputs_of, long_tail
from .other_families import tiny as tiny_of_the_others
from .pages import read
from .record import NOT_MEASURED, listed, table
from .tiny import SHARED, tiny

IDS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(0))
# mHC and iHC are within a rounding in float32 (tests/test_other_connections.py)
EXACT = {
    **dict.fromkeys(("shc", "frac", "attnres", "altup", "skip"), torch.float32),
    **dict.fromkeys(("mhc", "ihc"), torch.bfloat16),
}

ADDING_TWICE = ("aya_vision", "cohere")  # attention and MLP read once


def test_the_table_is_that_of_the_code():
    assert f"<!-- support -->\n{table()}\n<!-- /support -->" in read("docs/families.md")
    assert NOT_MEASURED not in table()
    assert len(listed()) > 50


@pytest.mark.parametrize("connection", EXACT)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_takes_every_connection_exactly(model_type, connection):
    assert_exact(copy.deepcopy(tiny(model_type)), connection)


@pytest.mark.parametrize("connection", EXACT)
@long_tail
def test_the_other_families_take_every_connection_exactly(model_type, connection):
    base = copy.deepcopy(tiny_of_the_others(model_type))
    if connection == "attnres" and model_type in ADDING_TWICE:
        with pytest.raises(ValueError, match="connection is 'attnres', which reads values for every sub-layer"):
            convert_model(base, connection=connection)
        return
    assert_exact(base, connection)


@torch.no_grad()
def assert_exact(base, connection: str) -> None:
    base.to(EXACT[connection])
    inputs, outputs = inputs_of(base), []
    for model in (base, convert_model(base, connection=connection)):
        torch.manual_seed(0)  # some models draw what they mask
        outputs.append(model(**inputs)[0])
    assert torch.equal(*outputs)


def test_every_convertible_connection_is_tried():
    """Dynamic hyper-connections by tests/test_families.py and tests/test_other_families.py."""
    assert {*EXACT, "dhc"} == set(CONVERTIBLE)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_family_trains_with_keel(model_type):
    family = FAMILIES[model_type]
    fields = {**SHARED, **FIELDS[model_type], "connection": "keel", "hc_mult": 1}
    torch.manual_seed(0)
    model = getattr(hf_hyperconn, f"HC{family.name}ForCausalLM")(
        getattr(hf_hyperconn, f"HC{family.name}Config")(**fields)
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = train(model, optimizer, [IDS] * 5)
    assert losses[-1] < losses[0]
