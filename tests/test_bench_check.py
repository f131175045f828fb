"""`make bench-check` notices what became slower."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import check
from hf_hyperconn.models.hyper_connections import HyperConnection

COMMITTED = {"conversion": {"lowest": 1.0, "median": 1.1, "highest": 1.2, "accepted": 1.44}}


def test_what_is_accepted_lies_a_fifth_above_the_highest():
    found = check.spread([{"conversion": value} for value in (1.2, 1.0, 1.1)])
    assert found == COMMITTED


@pytest.mark.parametrize(("ratio", "is_accepted"), [(0.5, True), (1.44, True), (1.441, False)])
def test_a_ratio_above_what_is_accepted_is_named(ratio, is_accepted):
    fault = f"conversion: measured {ratio:.3f}, accepted up to 1.440 (1.000 to 1.200 when it was committed)"
    assert check.faults({"conversion": ratio}, COMMITTED) == ([] if is_accepted else [fault])


def test_a_disturbed_measurement_is_made_again_and_a_regression_stays():
    for measured, number in (([2.0, 1.1], 0), ([2.0, 1.9], 1), ([1.1], 0)):
        values = iter(measured)
        assert len(check.check(COMMITTED, [lambda values=values: {"conversion": next(values)}])) == number
        assert not [*values]


def test_a_planted_regression_is_noticed(monkeypatch):
    """One operation more in each connection of a decoded token."""
    monkeypatch.setattr(check, "SHAPE", {**check.SHAPE, "hidden_size": 64, "num_hidden_layers": 2})
    monkeypatch.setattr(check, "DECODED", ("DHC×4",))
    monkeypatch.setattr(check.decoding, "REPEATS", 1)
    counts = {name: ratio for name, ratio in check.decoding_ratios().items() if name.startswith("operations")}
    committed = check.spread([counts])
    assert check.faults(counts, committed) == []
    forward = HyperConnection.forward

    def slower(self, streams):
        self.static_beta.clone()
        return forward(self, streams)

    monkeypatch.setattr(HyperConnection, "forward", slower)
    counts = {name: check.decoding_ratios()[name] for name in counts}
    assert len(check.faults(counts, committed)) == 1


def test_what_is_committed_was_measured_by_this_script():
    committed = json.loads(check.COMMITTED.read_text())
    assert committed["times"] == check.TIMES
    for figures in committed["ratios"].values():
        assert 0 < figures["lowest"] <= figures["median"] <= figures["highest"] <= figures["accepted"]


@pytest.mark.slow
@pytest.mark.tail
def test_nothing_became_slower():
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.check"],
        cwd=Path(check.__file__).parents[1],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
