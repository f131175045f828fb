"""The studies of benchmarks/pretraining: runs, their interruption, and the page made of their results."""

import json
import statistics
from dataclasses import replace

import pytest
import torch

from benchmarks.pretraining import report, runs, train
from benchmarks.pretraining.corpus import Corpus, corpus
from benchmarks.pretraining.runs import SCALES, STUDIES, Run

TINY = replace(
    SCALES["cpu"],
    dense={**SCALES["cpu"].dense, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    mixture={**SCALES["cpu"].mixture, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2},
    length=16,
    batch=2,
    held_out=(4, 8),
    compiled=(),
)
RUN = Run(study="scratch", model="DHC×4", seed=1, learning_rate=1e-2, steps=40, warm_up=2)
BASE = replace(RUN, study="base", model="Pre-Norm", seed=0)


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Tiny shapes, a text of random bytes, and folders of their own."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(0, 64, (8000,), generator=generator, dtype=torch.uint8)
    monkeypatch.setattr(train, "scale", lambda: TINY)
    monkeypatch.setattr(train, "corpus", lambda name: Corpus(text[:7000], text[7000:], 1, "random"))
    monkeypatch.setattr(train, "CURVES", tmp_path / "curves")
    monkeypatch.setattr(train, "WORK", tmp_path / "work")
    return tmp_path


def without_times(result: dict) -> dict:
    return {name: value for name, value in result.items() if name != "seconds_a_step"}


def test_an_interrupted_run_goes_on_as_if_it_had_not_been(place, monkeypatch):
    whole = train.train(RUN)
    monkeypatch.setattr(train, "CURVES", place / "interrupted")
    monkeypatch.setattr(train, "LOGS", 4)
    for _ in range(3):
        with pytest.raises(train.OutOfTime):
            train.train(RUN, deadline=0)
        assert not train.is_done(RUN)
    resumed = train.train(RUN)
    assert train.is_done(RUN)
    assert json.loads(next((place / "interrupted").iterdir()).read_text()) == resumed
    for result in (whole, resumed):
        result.pop("training")  # logged as often as it may be interrupted
    assert without_times(resumed) == without_times(whole)
    assert [point["step"] for point in whole["curve"]] == list(range(0, 41, 4))
    assert whole["curve"][-1]["loss"] < whole["curve"][0]["loss"]
    assert whole["matrices"]["before"] != whole["matrices"]["after"]


@pytest.mark.parametrize("model", [model for model in runs.MODELS if model != "Pre-Norm"])
def test_continuations_start_where_the_base_ended(place, model):
    """To the digits that results have; with noise they don't."""
    base = train.train(BASE)
    start = replace(RUN, study="continued", model=model, start=BASE.id, hc_lr=10.0)
    assert train.train(start)["curve"][0]["loss"] == base["curve"][-1]["loss"]
    if model == "DHC×4":
        assert train.train(replace(start, noise=0.1))["curve"][0]["loss"] != base["curve"][-1]["loss"]


def test_adapters_start_there_too_and_leave_the_base_alone(place):
    base = train.train(BASE)
    for model in runs.PAIR:
        run = replace(RUN, study="continued", model=model, start=BASE.id, rank=2)
        trained = {name for name, each in train.build(run).named_parameters() if each.requires_grad}
        assert trained
        assert all("lora_" in name or "modules_to_save" in name for name in trained)
        assert any("attn_hc" in name for name in trained) == (model != "Pre-Norm")
        assert train.train(run)["curve"][0]["loss"] == base["curve"][-1]["loss"]


def test_models_see_the_same_rows():
    rows = torch.arange(70).view(35, 2)
    first, again, other = (train.batches(rows, 4, seed) for seed in (1, 1, 2))
    epoch = [next(first) for _ in range(8)]
    assert all(torch.equal(ours, next(again)) for ours in epoch)
    assert not torch.equal(epoch[0], next(other))
    assert len(torch.cat(epoch).unique()) == 64


@pytest.mark.parametrize("family", runs.FAMILIES)
def test_models_from_scratch_have_the_same_start(place, family):
    """What a seed draws is the same for all, but for the paper's 1/√n of output projections."""
    plain = train.build(replace(RUN, model="Pre-Norm", family=family)).state_dict()
    for model in ("DHC×1", "SHC×4", "mHC×4"):
        ours = train.build(replace(RUN, model=model, family=family)).state_dict()
        scaled = {name for name in plain if not torch.equal(ours[name], plain[name])}
        assert all("o_proj" in name or "down_proj" in name for name in scaled)
        assert len(scaled) == (0 if model == "DHC×1" else 2 * len(plain_layers(plain)))
        assert all(torch.equal(ours[name], plain[name] / 2) for name in scaled)


def plain_layers(weights: dict) -> set[str]:
    return {name.split(".")[2] for name in weights if ".layers." in name}


def test_no_file_is_in_both_parts():
    found = corpus("headers")
    training, held_out = (bytes(part.tolist()) for part in (found.training, found.held_out))
    assert len(training) > 20 * len(held_out) > 1_000_000
    assert not any(held_out[start : start + 2000] in training for start in range(0, len(held_out), 50_000))


def test_ids_name_runs():
    for size in SCALES.values():
        for list_runs in STUDIES.values():
            listed = list_runs(size)
            assert len({run.id for run in listed}) == len(set(listed))


def test_intervals_are_those_of_students_t():
    """The table value for two degrees of freedom is 4.303."""
    found = report.interval([-0.02, -0.03, -0.04])
    assert found.mean == pytest.approx(-0.03)
    assert found.half_width == pytest.approx(4.303 * 0.01 / 3**0.5, rel=1e-3)
    assert found.detectable > found.half_width
    assert str(found) == "-0.0300 ± 0.0248"
    assert report.interval([-0.02]).half_width is None


def test_the_page_is_made_of_the_results():
    text = report.DOCS.read_text(encoding="utf-8")
    assert "<!-- cpu scratch Llama python -->" in text
    assert report.render(text) == text


def test_constants_follow_from_the_results():
    """The plain model has the best of the tried learning rates, and no fewer steps than DHC×4's time is worth."""
    size = SCALES["cpu"]
    tuning = report.finished(runs.tuning(size))
    for setting, results in tuning.items():
        if setting.study != "base":
            key = setting.family if setting.start is None else report.tuned(setting)
            best = tuning[replace(setting, learning_rate=size.taken[key])]
            assert best[1]["held_out_loss"] <= results[1]["held_out_loss"]
    found = report.by_study(size)["scratch"]
    for family in runs.FAMILIES:
        (setting,) = (each for each in found if (each.family, each.model) == (family, "DHC×4"))
        ours, theirs = found[setting], found[report.plain(setting)]
        ratio = statistics.median(ours[seed]["seconds_a_step"] / theirs[seed]["seconds_a_step"] for seed in ours)
        assert ratio <= size.slower[family] < 1.15 * ratio
