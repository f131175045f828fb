"""The study of benchmarks/vision: its images, its runs, their interruption, and the page made of their results."""

import shutil
import tarfile
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from PIL import Image

pytest.importorskip("diffusers")

from benchmarks.lines import put
from benchmarks.pretraining.resuming import OutOfTime
from benchmarks.pretraining.runs import PLAIN
from benchmarks.vision import report, studies, train
from benchmarks.vision.images import Images, read
from benchmarks.vision.studies import DIT, STUDIES, TASKS, VIT

TINY = {
    "ViT": replace(VIT, shape={**VIT.shape, "hidden_size": 16, "num_hidden_layers": 2}, batch=4, held_out=(8, 16)),
    "DiT": replace(DIT, shape={**DIT.shape, "attention_head_dim": 8, "num_layers": 2}, batch=4, held_out=(8, 16)),
}
STEPS = 20


def short(run, **settings):
    """The run, in few steps."""
    base = replace(studies.base(), steps=STEPS, warm_up=1).id
    return replace(run, steps=STEPS, warm_up=1, start=run.start and base, **settings)


def images_of(run) -> Images:
    """Random ones, always the same."""
    generator = torch.Generator().manual_seed(0)
    shape = (3, 16, 16) if run.family == "ViT" else (1, 8, 8)
    parts = [
        (
            torch.randint(256, (number, *shape), generator=generator, dtype=torch.uint8),
            torch.arange(number) % 3,
        )
        for number in (64, 32)
    ]
    return Images(*parts, ("a", "b", "c"), "random")


def result_of(run, **settings) -> dict:
    return train.train(run, images_of(run), tasks=TINY, **settings)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    """Folders of their own."""
    monkeypatch.setattr(train, "CURVES", tmp_path / "curves")
    monkeypatch.setattr(train, "WORK", tmp_path / "work")
    return tmp_path


def without_times(result: dict) -> dict:
    return {name: value for name, value in result.items() if name != "cpu_seconds_a_step"}


def test_images_of_an_archive_and_of_a_folder(tmp_path):
    for part, number in (("train", 3), ("test", 1)):
        for label in ("cat", "dog"):
            folder = tmp_path / "images" / part / label
            folder.mkdir(parents=True)
            for place in range(number):
                Image.new("RGB", (4, 4), (place, 0, 255)).save(folder / f"{place}.png")
    (tmp_path / "images" / "README.md").write_text("not an image")
    with tarfile.open(tmp_path / "images.tar.gz", "w:gz") as archive:
        archive.add(tmp_path / "images", "some/where")
    of_folder, of_archive = read(tmp_path / "images"), read(tmp_path / "images.tar.gz")
    assert of_folder.describe() == of_archive.describe()
    assert of_folder.classes == ("cat", "dog")
    (pixels, labels), (held_out, _) = of_archive.training, of_archive.held_out
    assert (pixels.shape, held_out.shape) == ((6, 3, 4, 4), (2, 3, 4, 4))
    assert labels.tolist() == [0, 0, 0, 1, 1, 1]
    assert pixels[:, 0, 0, 0].tolist() == [0, 1, 2, 0, 1, 2]
    assert torch.equal(pixels, of_folder.training[0])
    shutil.rmtree(tmp_path / "images" / "test")
    read.cache_clear()
    with pytest.raises(ValueError, match="has no images in test/. Give an archive or a folder with train/CLASS/FILE"):
        read(tmp_path / "images")


@pytest.mark.parametrize("run", [studies.classifying()[2], studies.denoising()[1]], ids=lambda run: run.family)
def test_an_interrupted_run_goes_on_as_if_it_had_not_been(run, place, monkeypatch):
    whole = result_of(short(run))
    monkeypatch.setattr(train, "CURVES", place / "interrupted")
    for _ in range(3):
        with pytest.raises(OutOfTime):
            result_of(short(run), deadline=0)
        assert not train.is_done(short(run))
    resumed = result_of(short(run))
    assert train.is_done(short(run))
    assert train.result_of(short(run)) == resumed
    assert without_times(resumed) == without_times(whole)
    assert [point["step"] for point in whole["curve"]] == list(range(0, STEPS + 1, 2))
    assert len(whole["matrix"]) == 5


def test_models_of_a_seed_see_the_same_and_conversions_start_where_the_base_ended(place):
    """Before the first step a DiT with connections computes what the plain one does, and so do continued ViTs."""
    base = result_of(short(studies.base()))
    starts = [result_of(short(run))["curve"][0] for run in studies.continued()[1:4]]
    assert {start["loss"] for start in starts} == {base["curve"][-1]["loss"]}
    plain, ours = (result_of(short(run))["curve"] for run in studies.denoising()[:2])
    assert plain[0]["loss"] == ours[0]["loss"] == pytest.approx(1, abs=0.1)
    assert plain[-1]["loss"] != ours[-1]["loss"]
    # so small a learning rate changes nothing, and what is left is what was seen
    runs = [short(run, learning_rate=1e-12, hc_lr=1.0) for run in studies.denoising()[:2]]
    again = [result_of(run)["curve"][-1]["loss"] for run in runs]
    assert again[0] == again[1]


def test_ids_name_runs():
    listed = {run for list_runs in STUDIES.values() for run in list_runs()}
    assert len({(run.study, run.id) for run in listed}) == len(listed)


def test_the_plain_models_have_the_best_of_the_tried_learning_rates():
    results = report.results(studies.rates())
    for family, task in TASKS.items():
        losses = {
            run.learning_rate: result["held_out_loss"] for run, result in results.items() if run.family == family
        }
        if len(losses) == len(task.tried):
            assert min(losses, key=losses.get) == task.taken["scratch"]


def test_the_page_is_made_of_the_results():
    page = report.SMALL.read_text(encoding="utf-8")
    assert report.render(page) == page
    with pytest.raises(ValueError, match="no mark"):
        report.render("")


def test_what_is_missing_is_said(place, monkeypatch):
    """Of seeds that both have, differences; of others, nothing."""
    monkeypatch.setattr(report, "CURVES", place / "curves")
    assert report.comparison(studies.classifying(), VIT) == report.tuning() == ""
    runs = studies.classifying()
    losses = {(PLAIN, 1): 2.0, (PLAIN, 2): 2.2, ("SHC×2", 1): 1.9, ("SHC×2", 2): 2.0, ("DHC×2", 3): 1.8}
    for run in runs:
        if (loss := losses.get((run.model, run.seed))) and run.steps == VIT.steps["scratch"]:
            result = {"images": {"sha256": "0"}, "held_out_loss": loss, "held_out_accuracy": loss / 4}
            put(train.path_of(run), run.id, {**result, "cpu_seconds_a_step": 0.1})
    table = report.comparison(runs, VIT)
    assert "| SHC×2 | 2 | 1.9500 | -0.1500 ± 0.6353 |" in table
    assert "| 48.8 % | -3.8 ± 15.9 | 100 ms |" in table
    assert "| DHC×2 | 1 | 1.8000 |  |  |  | 45.0 % |  | 100 ms |" in table
    assert "1 of 11 of `rates`, 5 of 9 of `classifying`, 0 of 10 of `continued`, 0 of 6 of" in report.state()
    put(train.path_of(runs[0]), runs[0].id, {**train.result_of(runs[0]), "images": {"sha256": "1"}})
    with pytest.raises(ValueError, match="several versions of the images 'cifar10'"):
        report.results(runs)
