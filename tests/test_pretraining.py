"""The studies of benchmarks/pretraining: runs, their interruption, and the page made of their results."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from torch import nn

from benchmarks.lines import put
from benchmarks.pretraining import report, runs, train
from benchmarks.pretraining.corpus import Corpus, _read, corpus
from benchmarks.pretraining.optimizers import Muon, optimizer_of
from benchmarks.pretraining.resuming import OutOfTime
from benchmarks.pretraining.runs import SCALES, STUDIES, Run
from benchmarks.pretraining.starts import FIXED, AddedReadout, fix_part
from hf_hyperconn import hc_parameters

from .marks import few
from .tolerances import ANOTHER_ORDER, LOOP_FLOAT64, ORTHOGONAL_BFLOAT16

TINY = replace(
    SCALES["cpu"],
    shapes={
        family: {**shape, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
        for family, shape in SCALES["cpu"].shapes.items()
    },
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


@pytest.mark.parametrize("settings", [{}, {"muon": True, "embedding_norm": True}])
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(place, monkeypatch, settings):
    run = replace(RUN, **settings)
    monkeypatch.setattr(train, "LOGS", 3)  # 40 steps are no multiple of every 13
    whole = train.train(run)
    monkeypatch.setattr(train, "CURVES", place / "interrupted")
    for _ in range(3):
        with pytest.raises(OutOfTime):
            train.train(run, deadline=0)
        assert not train.is_done(run)
    resumed = train.train(run)
    assert train.is_done(run)
    assert train.result_of(run, TINY) == resumed
    assert without_times(resumed) == without_times(whole)
    assert [step for step, _ in whole["training"]] == [13, 26, 39, 40]
    assert [point["step"] for point in whole["curve"]] == list(range(0, 41, 4))
    assert whole["curve"][-1]["loss"] < whole["curve"][0]["loss"]
    assert whole["matrices"]["before"] != whole["matrices"]["after"]


def test_an_interrupted_run_does_not_go_on_with_another_text(place, monkeypatch):
    with pytest.raises(OutOfTime):
        train.train(RUN, deadline=0)
    other = replace(train.corpus("python"), sha256="another")
    with pytest.raises(RuntimeError, match="is of another text"):
        train.train(RUN, text=other)


def test_continuations_belong_to_one_base(place):
    """Weights that were lost are made again; when they come out others, results of before don't go with them."""
    train.train(BASE)
    shutil.rmtree(place / "work")
    assert not train.is_done(BASE)
    train.train(BASE)
    assert train.is_done(BASE)
    put(train.path_of(BASE, TINY), BASE.id, {**train.result_of(BASE, TINY), "held_out_loss": 1.0})
    with pytest.raises(RuntimeError, match="came out another"):
        train.train(BASE)


@pytest.mark.slow
@pytest.mark.tail
@pytest.mark.parametrize("by_layer", [False, True])
def test_compiled_training_is_training(place, by_layer):
    ids = torch.randint(256, (TINY.batch, TINY.length))
    losses = []
    for compiles in (False, True):
        model, loss_of = train.build(RUN), train.loss_on
        if compiles and by_layer:
            train.compile_layers(model)
        elif compiles:
            loss_of = train.compiled_loss(RUN.model, RUN.family)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        losses.append([train.training_step(model, loss_of, optimizer, ids) for _ in range(4)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert losses[0][-1] < losses[0][0]


@pytest.mark.parametrize("model", few([model for model in runs.MODELS if model != runs.PLAIN], runs.HC))
def test_continuations_start_where_the_base_ended(place, model):
    """To the digits that results have; with noise they don't."""
    base = train.train(BASE)
    start = replace(RUN, study="continued", model=model, start=BASE.id, hc_lr=10.0)
    assert train.train(start)["curve"][0]["loss"] == base["curve"][-1]["loss"]
    if model == "DHC×4":
        assert train.train(replace(start, noise=0.1))["curve"][0]["loss"] != base["curve"][-1]["loss"]


def test_adapters_start_there_too_and_leave_the_base_alone(place):
    base = train.train(BASE)
    for model in (*runs.PAIR, "DHC×4 history by type"):
        run = replace(RUN, study="continued", model=model, start=BASE.id, rank=2)
        trained = {name: weight for name, weight in train.build(run).named_parameters() if weight.requires_grad}
        assert trained
        assert all("lora_" in name or "modules_to_save" in name for name in trained)
        whole = train.build(replace(run, rank=0))
        connections = [] if model == "Pre-Norm" else hc_parameters(whole).values()
        copies = [parameter for name, parameter in trained.items() if "modules_to_save" in name]
        assert sum(parameter.numel() for parameter in copies) == sum(parameter.numel() for parameter in connections)
        assert train.train(run)["curve"][0]["loss"] == base["curve"][-1]["loss"]


def test_an_embedding_s_norm_is_trained_and_stays_out_of_the_tied_output(place):
    plain, normed = (train.build(replace(RUN, model="Pre-Norm", embedding_norm=norm)) for norm in (False, True))
    assert set(normed.state_dict()) - set(plain.state_dict()) == {"model.embed_tokens.norm.weight"}
    ids = torch.arange(5)[None]
    rows = plain.get_input_embeddings()(ids)
    assert torch.equal(normed.get_output_embeddings().weight, plain.get_output_embeddings().weight)
    assert torch.equal(normed.get_input_embeddings()(ids), normed.model.embed_tokens.norm(rows))
    before = normed.model.embed_tokens.norm.weight.clone()
    train.training_step(normed, train.loss_on, optimizer_of(normed, RUN), ids)
    assert not torch.equal(normed.model.embed_tokens.norm.weight, before)


@pytest.mark.parametrize("model", runs.PAIR)
def test_muon_trains_the_matrices_of_layers_and_adamw_all_else(place, model):
    run = replace(RUN, model=model, muon=True)
    built = train.build(run)
    muon, adam = optimizer_of(built, run).parts
    names = {id(parameter): name for name, parameter in built.named_parameters()}
    of_muon, of_adam = (
        {names[id(parameter)] for group in part.param_groups for parameter in group["params"]} for part in (muon, adam)
    )
    assert of_muon == {name for name in names.values() if name.endswith("_proj.weight")}
    assert len(of_muon) == 14
    assert of_adam == set(names.values()) - of_muon
    assert adam.param_groups[0]["betas"] == (0.9, 0.95)


def test_muon_is_pytorch_s(place):
    """But for bfloat16, in which that one orthogonalizes."""
    start = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((8, 8), (4, 8), (24, 8))]
    ends = []
    for settings in ({}, {"adjust_lr_fn": "match_rms_adamw"}):
        weights = [nn.Parameter(weight.clone()) for weight in start]
        optimizer = (torch.optim.Muon if settings else Muon)(weights, lr=0.1, weight_decay=0.1, **settings)
        generator = torch.Generator().manual_seed(1)
        for _ in range(3):
            for weight in weights:
                weight.grad = torch.randn(weight.shape, generator=generator)
            optimizer.step()
        ends.append(weights)
    for ours, theirs, before in zip(*ends, start, strict=True):
        torch.testing.assert_close(ours - before, theirs - before, **ORTHOGONAL_BFLOAT16)
        assert not torch.equal(ours, before)


def test_models_of_a_seed_see_the_same_rows(place, monkeypatch):
    seen = []
    monkeypatch.setattr(
        train, "training_step", lambda model, loss_of, optimizer, ids, **settings: seen.append(ids) or 0.0
    )
    for run in (replace(RUN, model="Pre-Norm"), RUN, replace(RUN, seed=2)):
        train.train(run)
    theirs, ours, of_another_seed = (torch.cat(seen[i : i + RUN.steps]) for i in range(0, len(seen), RUN.steps))
    assert torch.equal(theirs, ours)
    assert not torch.equal(ours, of_another_seed)


def test_what_starts_from_a_step_of_a_trunk_goes_on_with_its_rows(place, monkeypatch):
    monkeypatch.setattr(train, "scale", lambda: replace(TINY, taken_at=(8, 20)))
    seen, step = [], train.training_step

    def noted(model, loss_of, optimizer, ids, **settings):
        seen.append(ids)
        return step(model, loss_of, optimizer, ids, **settings)

    monkeypatch.setattr(train, "training_step", noted)
    trunk = replace(RUN, study="trunk", model="Pre-Norm", decay=10)
    whole = train.train(trunk)
    assert train.is_done(trunk)
    assert len(seen) == trunk.steps
    for at in (8, 20):
        run = replace(RUN, study="continued", start=trunk.id, at=at, steps=trunk.steps - at, decay=10)
        theirs = next(point["loss"] for point in whole["curve"] if point["step"] == at)
        seen[trunk.steps :] = []
        assert train.train(run)["curve"][0]["loss"] == theirs
        assert torch.equal(torch.cat(seen[trunk.steps :]), torch.cat(seen[at : trunk.steps]))
    shutil.rmtree(train.weights_of(trunk.id, TINY, at))
    assert not train.is_done(trunk)
    put(train.path_of(trunk, TINY), trunk.id, {**whole, "held_out_loss": 0.0})
    with pytest.raises(RuntimeError, match="came out another than before"):
        train.train(trunk)
    assert not train.is_done(trunk)
    assert not train.weights_of(trunk.id, TINY, 8).exists()


def test_a_decay_follows_a_constant_rate():
    run = replace(RUN, decay=10)
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    schedule, rates = train.schedule_of(optimizer, run), []
    for _ in range(run.steps):
        rates.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    assert rates[:3] == [0.1, 0.55, 1.0]
    assert rates[2:31] == [1] * 29
    assert rates[31:] == pytest.approx([1 - 0.09 * step for step in range(1, 10)])
    assert schedule.get_last_lr() == pytest.approx([train.LAST_LEARNING_RATE])


@pytest.mark.parametrize("family", runs.FAMILIES)
def test_models_from_scratch_have_the_same_start(place, family):
    """What a seed draws is the same for all, but for the HC paper's 1/√n of output projections."""
    plain = train.build(replace(RUN, model="Pre-Norm", family=family)).state_dict()
    for model, undivided in (("DHC×1", False), ("SHC×4", False), ("SHC×4", True), ("mHC×4", False)):
        ours = train.build(replace(RUN, model=model, family=family, undivided=undivided)).state_dict()
        divided = {name for name in plain if not torch.equal(ours[name], plain[name])}
        assert all("o_proj" in name or "down_proj" in name for name in divided)
        is_divided = model == "SHC×4" and not undivided
        assert len(divided) == 2 * is_divided * TINY.shapes[family]["num_hidden_layers"]
        assert all(torch.equal(ours[name], plain[name] / 2) for name in divided)
    ours = train.build(replace(RUN, family=family)).state_dict()
    divided = train.build(replace(RUN, model="Pre-Norm", family=family, divided=True)).state_dict()
    assert divided.keys() == plain.keys()
    assert all(torch.equal(divided[name], ours[name]) for name in plain)


def test_side_streams_of_the_embedding_alone(place):
    """No sub-layer writes them at the start, and nothing else is another."""
    run = replace(RUN, model="DHC×4 history by type")
    by_type, alone = (train.build(replace(run, alone=alone)).state_dict() for alone in (False, True))
    written = {name for name in by_type if not torch.equal(by_type[name], alone[name])}
    assert written == {name for name in by_type if name.endswith("static_beta")}
    assert all(alone[name].tolist() == [1, 0, 0, 0] for name in written)


@pytest.mark.parametrize("model", ["Pre-Norm", "DHC×4"])
def test_copies_of_layers_add_nothing_yet_and_learn(place, model):
    base = train.train(BASE)
    run = replace(RUN, study="continued", model=model, start=BASE.id, layers=3)
    assert train.build(run).config.num_hidden_layers == 3
    result = train.train(run)
    assert result["curve"][0]["loss"] == base["curve"][-1]["loss"]
    assert result["held_out_loss"] != train.train(replace(run, layers=0))["held_out_loss"]


def test_skips_from_the_embedding_start_as_the_plain_model_and_reach_every_layer(place):
    run = replace(RUN, model="Pre-Norm", embedding_norm=True)
    ids = torch.randint(0, 64, (1, 9))
    plain, model = train.build(run), train.build(replace(run, skips=True))
    assert torch.equal(model(ids).logits, plain(ids).logits)
    train.loss_on(model, ids).backward()
    assert all(layer.skip.grad.count_nonzero() == 2 for layer in model.model.layers)
    stream = model.model.embed_tokens(ids)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.skip.copy_(torch.tensor([0.0, 1.0]))
    seen = []
    model.model.layers[-1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    model(ids)
    assert torch.equal(*seen, stream)
    with pytest.raises(ValueError, match="must be of a plain model"):
        train.build(replace(RUN, skips=True))


def test_normed_side_streams_start_as_the_usual_ones_and_learn(place):
    run = replace(RUN, model="DHC×4 history by type")
    ids = torch.randint(0, 64, (1, 9))
    usual, model = train.build(run), train.build(replace(run, side_norm=True))
    assert torch.equal(model(ids).logits, usual(ids).logits)
    first, *sides = model.model.layers[0].expand(model.model.embed_tokens(ids)).unbind(-2)
    assert torch.equal(first, model.model.embed_tokens(ids))
    for side in sides:
        mean_square = first.square().mean(-1, keepdim=True)
        torch.testing.assert_close(side, first / (mean_square + model.config.rms_norm_eps).sqrt(), **ANOTHER_ORDER)
    train.loss_on(model, ids).backward()
    connection, _ = model.model.layers[0].sub_layers[0]
    assert connection.static_alpha.grad[1:, 0].all()


def test_attention_residuals_that_add_to_the_stream_start_as_the_base_and_learn(place):
    base = train.train(BASE)
    settings = {"start": BASE.id, "learning_rate": 1e-3, "hc_lr": 100.0}
    run = replace(RUN, study="continued", model="attention residuals, blocks of 4", added=True, **settings)
    assert {name.rpartition(".")[2] for name in hc_parameters(train.build(run))} == {"query", "gate"}
    result = train.train(run)
    assert result["curve"][0]["loss"] == base["curve"][-1]["loss"]
    assert result["held_out_loss"] != train.train(replace(run, model="Pre-Norm", added=False))["held_out_loss"]


def test_what_is_added_to_the_stream_is_a_softmax_over_earlier_outputs_and_zeros():
    read = AddedReadout(4)
    read.add_gate()
    nn.init.normal_(read.query)
    nn.init.constant_(read.gate, 0.5)
    read, (stream, *values) = read.double(), torch.randn(4, 1, 1, 4, dtype=torch.float64)
    normed = [nn.functional.rms_norm(value, (4,), eps=read.eps) for value in (torch.zeros_like(stream), *values)]
    weights = torch.stack([value @ read.query for value in normed], dim=-1).softmax(-1)
    expected = stream + 0.5 * sum(weights[..., i + 1 : i + 2] * value for i, value in enumerate(values))
    torch.testing.assert_close(read(torch.stack((stream, *values), dim=-2)), expected, **LOOP_FLOAT64)


@pytest.mark.parametrize("part", FIXED)
def test_a_fixed_part_of_connections_stays_and_all_else_moves(part):
    model = train.build(replace(RUN, model="SHC×2 history"), TINY)
    before = {name: parameter.clone() for name, parameter in hc_parameters(model).items()}
    fix_part(model, part)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0)
    for _ in range(3):
        train.training_step(model, train.loss_on, optimizer, torch.randint(0, 64, (2, 16)))
    for name, parameter in hc_parameters(model).items():
        moved, expected = parameter != before[name], torch.ones_like(parameter, dtype=torch.bool)
        if name.endswith("static_alpha"):
            expected[:, 0], expected[:, 1:] = part != "reads", part != "mixes"
        expected &= not (part == "writes" and name.endswith("static_beta"))
        expected &= not (part == "first half" and name.startswith("model.layers.0."))
        assert torch.equal(moved.any(), expected.any()), name
        assert not (moved & ~expected).any(), name


def test_no_file_is_in_both_parts(tmp_path):
    """Copies of a file fall to the same side, and are read once; another file moves none."""
    for i in range(300):
        (tmp_path / f"{i}.h").write_bytes(b"%d;" % (i // 2) * 30)
    before, after = _read(sorted(tmp_path.glob("*.h"))[:200]), _read(tmp_path.glob("*.h"))
    assert after.files == 150
    sides = [
        [set(bytes(part.tolist()).split(b"\n")) for part in (text.training, text.held_out)] for text in (before, after)
    ]
    assert all(sides[1])
    assert not sides[1][0] & sides[1][1]
    assert sides[0][0] <= sides[1][0]
    assert sides[0][1] <= sides[1][1]


@pytest.mark.slow
def test_the_text_is_there():
    text = corpus("headers")
    assert text.files > 1000
    assert len(text.training) > 20 * len(text.held_out) > 1_000_000


def test_ids_name_runs():
    for size in SCALES.values():
        listed = {run for list_runs in STUDIES.values() for run in list_runs(size)}
        assert len({(run.study, run.id) for run in listed}) == len(listed)


def test_intervals_are_those_of_students_t():
    """4.303 is the table's value for two degrees of freedom; power is checked by drawing."""
    interval = report.interval([-0.02, -0.03, -0.04])
    assert interval.mean == pytest.approx(-0.03)
    assert interval.half_width == pytest.approx(4.303 * 0.01 / 3**0.5, rel=1e-3)
    assert str(interval) == "-0.0300 ± 0.0248"
    drawn = interval.detectable + 0.01 * torch.randn(100_000, 3, generator=torch.Generator().manual_seed(0)).double()
    shown = drawn.mean(1).abs() > 4.303 * drawn.std(1) / 3**0.5
    assert shown.double().mean() == pytest.approx(0.8, abs=0.01)
    assert report.interval([-0.02]).half_width is None


def test_the_page_is_made_of_the_results():
    page = report.SMALL.read_text(encoding="utf-8")
    assert report.render(page) == page
    with pytest.raises(ValueError, match="no mark"):
        report.render("")


def test_the_plain_model_has_the_best_of_the_tried_learning_rates():
    size = SCALES["cpu"]
    tuning = {s: results for s, results in report.finished(runs.tuning(size), size).items() if s.study != "base"}
    for kind in {runs.tuned_as(setting) for setting in tuning}:
        losses = {s.learning_rate: each[1]["held_out_loss"] for s, each in tuning.items() if runs.tuned_as(s) == kind}
        assert min(losses, key=losses.get) == size.taken[kind]


def test_the_plain_model_has_as_many_steps_as_the_time_of_the_other_is_worth():
    size = SCALES["cpu"]
    taken = json.loads((report.CURVES / "cpu" / "times.json").read_text(encoding="utf-8"))
    for family in runs.FAMILIES:
        theirs, ours = (taken[family][model] for model in runs.PAIR)
        assert ours / theirs <= size.slower[family] < 1.15 * ours / theirs
