"""What `make test-quantised` found last is what docs/quantised.md says, and it tells what went wrong."""

import pytest
import torch

from .campaigns.quantised.__main__ import compare, judge
from .campaigns.quantised.cases import MODELS, SCHEMES
from .campaigns.quantised.page import FIGURES

BASE = {"distance": 0.1, "noise": 0.2, "reloaded": True}
CONVERSION = {"distance": 0.13, "noise": 0.25, "reloaded": True, "connections": True}


def test_the_page_says_what_was_found_last():
    assert FIGURES.rendered() == FIGURES.written()
    assert FIGURES.written().count(", as the base |") == 2 * len(SCHEMES)  # DHC×4 and mHC×4


def test_nothing_failed():
    rows = FIGURES.read()["rows"]
    assert [(row["scheme"], row["model"]) for row in rows] == [
        (scheme, model) for scheme in SCHEMES for model in MODELS
    ]
    assert all(row["ok"] for row in rows)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"error": "OSError: no"}, "OSError: no"),
        ({"connections": False}, "connections changed"),
        ({"reloaded": False}, "loaded again"),
        ({"equal_to_base": False}, "other logits than its base"),
        ({"distance": 0.14}, "0.140 away, where its base allows 0.138"),
    ],
)
def test_what_is_wrong_is_said(change, said):
    fault = judge({**CONVERSION, **change}, BASE)
    assert said in fault
    assert bool(fault) == bool(said)


KEPT = torch.ones(2)


@pytest.mark.parametrize("changed", [{}, {"a": KEPT + 1e-6}])
def test_connections_are_compared_before_and_after_loading(changed):
    answer = {"logits": torch.ones(3), "parameters": {"a": KEPT}}
    plain = {"logits": torch.ones(3), "noisy": torch.ones(3)}
    connections = {"a": KEPT}
    assert compare(answer, answer, plain, connections)["connections"]
    for found in ((answer, {**answer, "parameters": changed}), ({**answer, "parameters": changed}, answer)):
        assert not compare(*found, plain, connections)["connections"]
