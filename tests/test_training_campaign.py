"""`make test-trainers` tells what a tool did wrong to a conversion."""

import pytest
from safetensors.torch import load_file, save_file

from hf_hyperconn import HCLlamaForCausalLM, hc_parameters

from .campaigns.trainers.cases import Case
from .campaigns.trainers.compare import SAVED, Runs

ANSWER = {"losses": [7.0, 6.0, 5.0, 4.0], "distance": 0.0, "is_trained": True, "compared": {"logps/chosen": -2.0}}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Runs, with a saved model whose connections have all moved."""
    runs = Runs(tmp_path_factory.mktemp("runs"))
    model = HCLlamaForCausalLM.from_pretrained(runs.conversion)
    for parameter in hc_parameters(model).values():
        parameter.data += 0.1
    model.save_pretrained(runs.place / "job" / SAVED)
    return runs


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({}, ""),
        ({"losses": [7.0001, 6.0, 5.0, 4.0]}, "first losses 7.0001 and, of the base, 7.0"),
        ({"losses": [7.0, 6.0, float("nan"), 4.0]}, "first losses"),
        (
            {"compared": {"logps/chosen": -1.0}},
            "at first {'logps/chosen': -1.0} and, of the base, {'logps/chosen': -2.0}",
        ),
        ({"resumed": [5.0, 4.0]}, ""),
        ({"resumed": [5.0, 4.5]}, "after resuming [5.0, 4.5]"),
        ({"loaded": False}, "does not load what it saved"),
        ({"distance": 0.1}, "loaded again, outputs are 0.1 away"),
        ({"error": "out of memory"}, "the conversion fails: out of memory"),
    ],
    ids=str,
)
def test_what_is_wrong_with_an_answer_is_told(change, said, runs):
    found = runs.wrong({**ANSWER, **change}, ANSWER)
    assert said in found
    assert bool(found) == bool(said)


def test_what_is_wrong_with_saved_connections_is_told(runs):
    file = runs.place / "job" / SAVED / "model.safetensors"
    moved, name = load_file(file), "model.layers.1.mlp_hc.static_beta"
    changes = {
        f"connections did not move: {name}": {name: runs.start[name]},
        f"{name} is saved in bfloat16": {name: moved[name].bfloat16()},
    }
    for said, change in changes.items():
        save_file({**moved, **change}, file, {"format": "pt"})
        assert runs.wrong(ANSWER, ANSWER) == said
    save_file({other: tensor for other, tensor in moved.items() if other != name}, file, {"format": "pt"})
    assert runs.wrong(ANSWER, ANSWER) == f"connections are not saved: {name}"
    save_file(moved, file, {"format": "pt"})


@pytest.mark.parametrize(
    ("answers", "case", "is_ok"),
    [
        ([ANSWER, ANSWER], Case("a", "b", {}), True),
        ([ANSWER, {"error": "x"}], Case("a", "b", {}), False),
        ([{"error": "x"}], Case("a", "b", {}), False),
        ([ANSWER, ANSWER, {"error": "say y"}], Case("a", "b", {}, needs="y", message="say y"), True),
        ([ANSWER, ANSWER, {"error": "x"}], Case("a", "b", {}, needs="y", message="say y"), False),
        ([ANSWER, ANSWER, ANSWER], Case("a", "b", {}, needs="y", message="say y"), False),
        ([{"error": "say y"}], Case("a", "b", {}, because="y", message="say y"), True),
        ([{"error": "x"}], Case("a", "b", {}, because="y", message="say y"), False),
        ([ANSWER], Case("a", "b", {}, because="y", message="say y"), False),
    ],
    ids=str,
)
def test_a_case_is_what_it_says_or_not(answers, case, is_ok, runs, monkeypatch):
    answers = iter(answers)
    monkeypatch.setattr(runs, "run", lambda *_: {"versions": {}, **next(answers)})
    assert runs.compare(case)["ok"] is is_ok
    assert not list(answers)
