"""The study of benchmarks/depth: its text, its runs, and the tables made of their results."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.depth import evidence, naming, plots, report, studies, text
from benchmarks.lines import put
from benchmarks.pretraining import train
from benchmarks.pretraining.runs import PLAIN
from benchmarks.timing import RESULTS, device, kept_mib

TINY = replace(
    studies.DEEP,
    shapes={"Llama": {**studies.DEEP.shapes["Llama"], "hidden_size": 16, "num_hidden_layers": 2}},
    length=16,
    batch=2,
    steps={"scratch": 10, "base": 20, "continued": 10},
    held_out=(4, 8),
    compiled=(),
    vocabulary=300,
)


@pytest.fixture
def written(tmp_path, monkeypatch) -> Path:
    """A text of a few words, tiny shapes, and folders of their own."""
    for module in (studies, report):
        monkeypatch.setattr(module, "DEEP", TINY)
    monkeypatch.setattr(train, "CURVES", tmp_path / "curves")
    for module in (train, evidence):
        monkeypatch.setattr(module, "WORK", tmp_path / "work")
    monkeypatch.setattr(evidence, "SIZE", TINY)
    monkeypatch.setattr(evidence, "STEPS", 10)
    monkeypatch.setattr(text, "PLACE", tmp_path / "text")
    words, choose = ["sea", "ship", "storm", "and", "the", "captain"], random.Random(0)
    file = tmp_path / "words.txt"
    file.write_text("".join(" ".join(choose.choices(words, k=9)) + "\n" for _ in range(2000)), encoding="utf-8")
    return file


def test_tokens_are_the_text_s_and_none_is_in_both_parts(written):
    tokens = text.given(written, None, TINY.vocabulary)
    tokenizer = text.bpe(written.read_bytes()[: -len(written.read_bytes()) // 50], TINY.vocabulary)
    parts = [tokenizer.decode(part.tolist()) for part in (tokens.training, tokens.held_out)]
    assert "".join(parts) == written.read_text(encoding="utf-8")
    assert len(tokens.training) > 40 * len(tokens.held_out) > 0
    assert text.given(written, written, TINY.vocabulary).sha256 != tokens.sha256


def test_another_text_has_the_tokens_that_the_base_knows(written):
    other = written.with_name("other.txt")
    other.write_text("a whale and a gull\n" * 200, encoding="utf-8")
    known = text.given(written, None, TINY.vocabulary)
    tokens = text.another(written, None, other, written, TINY.vocabulary)
    tokenizer = text.bpe(written.read_bytes()[: -len(written.read_bytes()) // 50], TINY.vocabulary)
    assert tokenizer.decode(tokens.training.tolist()) == other.read_text(encoding="utf-8")
    whole_words = len(known.training) - 1  # the cut may be within the last
    assert torch.equal(tokens.held_out[:whole_words], known.training[:whole_words])
    assert tokens.sha256 != known.sha256


def test_no_two_runs_share_a_name_and_rows_of_a_table_are_of_one_setting():
    listed = [(studies.size_of(name), run) for name, study in studies.STUDIES.items() for run in study()]
    assert len({(size.name, run.id) for size, run in listed}) == len({(size.name, run) for size, run in listed})
    for name, study in studies.STUDIES.items():
        settings: dict[str, set] = {}
        for run in study():
            if run.study != "base":
                tuned = {"learning_rate": 0.0, "hc_lr": 1.0}
                row = naming.name_of(run, studies.size_of(name))
                settings.setdefault(row, set()).add(replace(run, seed=0, **tuned))
        assert {row for row, runs_of_name in settings.items() if len(runs_of_name) > 1} == set()


def test_a_run_has_as_many_layers_as_it_says(written):
    (run, *_) = studies.deeper()
    assert len(train.build(run, TINY).model.layers) == run.layers == 48


@pytest.mark.parametrize("norms", ["q_norm.weight", "post_self_attn_layernorm.weight"])
def test_rivals_of_other_layers_are_llama_with_more_norms(norms):
    """Not another number of heads, nor biases: all other parameters are Llama's, gate and up in one for GLM-4."""
    family = {"q_norm.weight": "Qwen3", "post_self_attn_layernorm.weight": "GLM-4"}[norms]
    (run, *_) = [run for run in studies.rivals() if run.family == family]
    theirs, plain = (train.build(each, studies.DEEP) for each in (run, replace(run, family="Llama")))
    assert any(name.endswith(norms) for name in theirs.state_dict())
    sizes = [
        sum(each.numel() for name, each in model.named_parameters() if "norm" not in name) for model in (theirs, plain)
    ]
    assert sizes[0] == sizes[1]
    assert not any(name.endswith("bias") for name in theirs.state_dict())
    if family == "Qwen3":
        assert all(torch.equal(theirs.state_dict()[name], each) for name, each in plain.state_dict().items())


def test_each_is_compared_with_the_plain_model_on_the_same_text(written):
    tried = [run for run in studies.other_text_rates() if run.study != "base"]
    for run in tried:
        loss = 3.0 + run.learning_rate + (run.model == "DHC×4")
        put(train.path_of(run, TINY), run.id, {"held_out_loss": loss, "corpus": {"sha256": "0"}})
    rows = report.comparison(studies.other_text()).splitlines()
    assert "| DHC×4, another text | 0.0003, 3× | 1 | 4.0003 | +1.0000 |" in rows
    assert "| Pre-Norm, another text | 0.0003 | 1 | 3.0003 |  |" in rows
    assert report.by_rate(tried).splitlines()[0] == "|  | 0.0003 | 0.001 | 0.002 | 0.004 |"
    put(train.path_of(run, TINY), run.id, {"held_out_loss": loss, "corpus": {"sha256": "1"}})
    with pytest.raises(ValueError, match="for another text come from 2 texts"):
        report.by_rate(tried)


def test_a_rival_is_compared_with_the_history_start_of_its_optimizer_seed_by_seed(written):
    for run in studies.skips():
        loss = 4 - run.steps / 1e3 + run.seed / 10 + run.muon + 2 * (run.model == PLAIN) - run.embedding_norm / 4
        if run.seed < 3 or not run.skips:
            put(train.path_of(run, TINY), run.id, {"held_out_loss": loss, "corpus": {"sha256": "0"}})
    rows = report.by_seed(studies.skips()).splitlines()
    assert "| Pre-Norm | 5.1000 | 5.2000 | 5.3000 | -2.0000 ± 0.0000 | -2.2500 ± 0.0000 |" in rows
    assert "| Pre-Norm, skips from the normed embedding, Muon | 5.8500 | 5.9500 |  | -1.7500 ± 0.0000 |  |" in rows
    assert "| skips | 3.1000 | 3.2000 | 3.3000 | +0.0000 ± 0.0000 | -0.2500 ± 0.0000 |" in rows
    assert "| DHC×4 history by type, norm of the embedding | 2.8500 | 2.9500 | 3.0500 |  |  |" in rows


def test_what_starts_early_ends_with_the_trunk_and_is_told_by_the_part_before_it(written, monkeypatch):
    monkeypatch.setattr(studies, "DEEP", replace(TINY, steps={**TINY.steps, "trunk": 2000}))
    runs = studies.when()
    trunk, *rest = runs
    assert {run.at for run in rest} == {0, *TINY.taken_at}
    assert all(run.start == (trunk.id if run.at else None) for run in rest)
    assert {run.steps / (trunk.steps - run.at) for run in rest if run.model == PLAIN} == {1, 1.25}
    assert all(run.at + run.steps == trunk.steps for run in rest if run.model != PLAIN)
    assert report.by_start(runs) == ""
    for run in runs[:-1]:
        loss = 3 + run.at / 1e4 + run.learning_rate
        put(train.path_of(run, TINY), run.id, {"held_out_loss": loss, "corpus": {"sha256": "0"}})
    assert report.by_start(runs).splitlines() == [
        "|  | 0% | 10% | 25% | 50% | 75% |",
        "|---|---|---|---|---|---|",
        "| Pre-Norm, 0.004 | 3.0040 | 3.0240 | 3.0540 | 3.1040 | 3.1540 |",
        "| DHC×4 history by type, 0.004 | 3.0040 | 3.0240 | 3.0540 | 3.1040 | 3.1540 |",
        "| Pre-Norm, 0.004, 1.25× the steps left | 3.0040 | 3.0240 | 3.0540 | 3.1040 | 3.1540 |",
        "| skips, 0.004 | 3.0040 |  | 3.0540 | 3.1040 | 3.1540 |",
        "| Pre-Norm, 0.008 |  | 3.0280 | 3.0580 | 3.1080 | 3.1580 |",
        "| DHC×4 history by type, 0.008 |  | 3.0280 | 3.0580 | 3.1080 | 3.1580 |",
    ]


@pytest.mark.slow
@pytest.mark.tail
def test_conversions_start_where_the_base_ended_but_for_the_control(written):
    corpus = text.given(written, None, TINY.vocabulary)
    base = train.train(studies.base(), size=TINY, text=corpus)
    assert train.is_done(studies.base(), TINY)
    starts = {}
    for run in dict.fromkeys(replace(run, hc_lr=3.0) for run in studies.rates() if run.study == "continued"):
        if run.learning_rate == TINY.taken["continued"]:
            starts[run.model] = train.train(run, size=TINY, text=corpus)["curve"][0]["loss"]
    assert starts.keys() == {PLAIN, *studies.METHODS}
    assert starts == pytest.approx(dict.fromkeys(starts, base["curve"][-1]["loss"]), abs=1e-5)
    (control, *_) = [run for run in studies.continued() if run.lane != 1]
    assert train.train(control, size=TINY, text=corpus)["curve"][0]["loss"] != pytest.approx(starts[PLAIN], abs=1e-5)


def test_the_best_of_the_tried_is_taken_when_all_are_there(written):
    tried = [run for run in studies.rates() if run.model == "DHC×4"]
    assert len(tried) == 6
    for place, run in enumerate(tried):
        assert naming.best("DHC×4", studies.rates()) is None
        put(train.path_of(run, TINY), run.id, {"held_out_loss": abs(place - 4)})
    assert naming.best("DHC×4", studies.rates()) == tried[4]
    assert {run.seed for run in studies.continued() if replace(run, seed=1) == tried[4]} == set(studies.SEEDS)


def test_the_pages_are_made_of_the_results(tmp_path, monkeypatch):
    for page, tables in [*report.PAGES.items()]:
        assert report.render(page) == page.read_text(encoding="utf-8")
        empty = tmp_path / page.name
        empty.touch()
        monkeypatch.setitem(report.PAGES, empty, tables)
        with pytest.raises(ValueError, match="no mark"):
            report.render(empty)


def test_evidence_trains_every_model_on_the_same_rows_once(written):
    runs = evidence.runs("words")
    assert len(runs) == len(set(runs)) == 3 * len(evidence.SEEDS)
    results = [evidence.result_of(run, written, None) for run in runs if run.seed == 1]
    assert [result["curve"][-1]["step"] for result in results] == [10, 10, 10]
    assert all(result["corpus"] == results[0]["corpus"] for result in results)
    assert not (train.CURVES / TINY.name).exists()
    times = [path.stat().st_mtime_ns for path in sorted((train.WORK / TINY.name).glob("*.jsonl"))]
    assert [evidence.result_of(run, written, None) for run in runs if run.seed == 1] == results
    assert times == [path.stat().st_mtime_ns for path in sorted((train.WORK / TINY.name).glob("*.jsonl"))]
    plain, rival, ours = (result["held_out_loss"] for result in results)
    assert evidence.table(results).splitlines()[2:] == [
        f"| Pre-Norm | {plain:.4f} |  |  |",
        f"| skips | {rival:.4f} | {rival - plain:+.4f} |  |",
        f"| DHC×4 history by type | {ours:.4f} | {ours - plain:+.4f} | {ours - rival:+.4f} |",
    ]
    tuned = [*results, *(evidence.result_of(run, written, None) for run in evidence.other_rates("words"))]
    assert evidence.table(tuned) == evidence.table(results)
    head, _, row = evidence.plain_by_rate(tuned).splitlines()
    assert head == "|  | 0.002 | 0.003 | 0.004 | 0.006 |"
    assert f" | {plain:.4f} | " in row
    figure = written.with_name("losses.png")
    plots.draw({result["model"]: [result] for result in results}, figure)
    assert figure.stat().st_size > 5000


def test_without_a_text_it_is_source_code(written, monkeypatch):
    source = text.Corpus(
        *(torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in (b"a b\n", b"b\n")), 2, "0"
    )
    monkeypatch.setattr(text, "corpus", {"python": source}.get)
    tokens = text.given(None, None, 300)
    assert (tokens.files, tokens.sha256) == (2, "0")
    assert (len(tokens.training), len(tokens.held_out)) == (3, 2)


def test_the_evidence_on_the_page_is_the_committed():
    page = evidence.DOCS.read_text(encoding="utf-8")
    assert evidence.render(page) == page


def test_the_longer_plain_run_takes_as_long_as_one_with_connections():
    for size in ("deep", "small"):
        taken = json.loads((report.CURVES / size / "times.json").read_text(encoding="utf-8"))["Llama"]
        assert 1 < max(taken.values()) / taken[PLAIN] < studies.DEEP.slower["Llama"] < 1.3


def test_at_a_billion_parameters_a_step_costs_no_more_than_the_page_assumes():
    rows = json.loads((RESULTS / "models.json").read_text(encoding="utf-8"))["rows"]
    measured = {row["case"]: row["step"]["ratio"] for row in rows if row["case"] in ("HC", "HC, compiled")}
    assert len(measured) == 2
    assert round(max(measured.values()), 2) == studies.AT_A_BILLION


def test_kept_memory_is_what_a_forward_keeps():
    weight = torch.zeros(2**24, requires_grad=True, device=device())
    assert kept_mib(lambda: weight.exp().sum()) == pytest.approx(weight.numel() * 4 / 2**20, abs=4)
    assert kept_mib(weight.sum) == pytest.approx(0, abs=4)
