"""Folders that older code wrote: read with and without this package, verified, pushed and refreshed."""

import json
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.dynamic_module_utils import get_class_from_dynamic_module

from hf_hyperconn import __version__
from hf_hyperconn.analysis.study import study
from hf_hyperconn.analysis.unfolding import unfold_static
from hf_hyperconn.conversion import cli
from hf_hyperconn.conversion.push.folder import open_checked
from hf_hyperconn.conversion.refresh import refresh
from hf_hyperconn.conversion.verify import verify_checkpoint
from hf_hyperconn.errors import ConversionError, PushError
from hf_hyperconn.families.family import Family, find_family
from hf_hyperconn.training.monitor import hc_figures

from .golden_folders import FOLDERS
from .marks import few
from .processes import elsewhere
from .tolerances import FLOAT32

NAMES = sorted(path.stem for path in FOLDERS.glob("*.zip"))
PROMPTS = [[3, 4, 5, 6, 7], [8, 9]]
named = pytest.mark.parametrize("name", NAMES)


def unpacked(name: str, place: Path) -> Path:
    """The converted folder of a golden one, beside its base."""
    with zipfile.ZipFile(FOLDERS / f"{name}.zip") as archive:
        archive.extractall(place)
    return place / "converted"


def differing(folders: list[Path], place: Path) -> list[list[str]]:
    """What a process without this package finds to differ from the base of each, in float32 and in bfloat16."""
    comparisons = [
        {
            "base": str(folder.with_name("base")),
            "converted": [str(folder)],
            "attention": None,
            "dtypes": ["float32", "bfloat16"],
            "prompts": PROMPTS,
        }
        for folder in folders
    ]
    return [*elsewhere([{"comparisons": comparisons, "new_tokens": 4}], place).values()]


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_they_are_read_without_the_package(tmp_path):
    folders = [unpacked(name, tmp_path / name) for name in NAMES]
    assert differing(folders, tmp_path) == [[]] * 2 * len(folders)


@named
@torch.no_grad()
def test_it_is_read_with_the_package(name, tmp_path):
    folder = unpacked(name, tmp_path)
    base, model = (AutoModelForCausalLM.from_pretrained(each) for each in (folder.with_name("base"), folder))
    assert type(model).__module__.startswith("hf_hyperconn.models.")
    ids = torch.tensor(PROMPTS[:1])
    assert torch.equal(model(ids).logits, base(ids).logits)


@named
def test_with_its_own_code_it_is_studied(name, tmp_path):
    """As where its code was imported before this package."""
    folder = unpacked(name, tmp_path)
    reference = json.loads((folder / "config.json").read_text())["auto_map"]["AutoModelForCausalLM"]
    model = get_class_from_dynamic_module(reference, folder).from_pretrained(folder)
    ids = torch.tensor(PROMPTS[:1])
    assert not type(model).__module__.startswith("hf_hyperconn")
    torch.testing.assert_close(study(model, [ids]).matrices.inputs, unfold_static(model).inputs, **FLOAT32)
    assert hc_figures(model, ids)


@named
def test_it_is_verified_and_may_be_pushed_as_it_is(name, tmp_path):
    folder = unpacked(name, tmp_path)
    report = verify_checkpoint(folder, str(folder.with_name("base")), mode="full")
    assert report.passed, report.failure
    assert not report.changes
    (note,) = report.notes
    assert note.startswith("code is of hf_hyperconn 0.1.0.dev")
    assert "`hf-hyperconn refresh` brings it up to date" in note
    open_checked(folder, (), False, lambda line: None)


@pytest.mark.parametrize("name", few(NAMES, NAMES[0]))
def test_refreshed_it_has_the_code_of_this_release_and_the_same_weights(name, tmp_path, capsys):
    folder = unpacked(name, tmp_path)
    before, inode = contents(folder), (folder / "model-00001-of-00002.safetensors").stat().st_ino
    assert cli.main(["refresh", str(folder), "--dry-run"]) == 0
    assert contents(folder) == before
    planned = capsys.readouterr().out
    assert cli.main(["refresh", str(folder)]) == 0
    assert capsys.readouterr().out == planned
    after = contents(folder)
    kept = [name for name in before if not name.endswith((".py", ".json"))]
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert (folder / "model-00001-of-00002.safetensors").stat().st_ino == inode
    config = json.loads(after["config.json"])
    code = find_family(config["model_type"].removeprefix("hc_")).code(config)
    assert {name: after[name].decode() for name in after if name.endswith(".py")} == code
    assert not code.keys() >= {name for name in before if name.endswith(".py")}  # it had those of all kinds
    assert (config["hc_format"], config["hc_version"]) == (1, __version__)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "converted"]
    with pytest.raises(PushError, match="has never been compared with its base"):
        open_checked(folder, (), False, lambda line: None)
    assert cli.main(["verify", str(folder), "--against", str(folder.with_name("base"))]) == 0
    assert not verify_checkpoint(folder).notes
    open_checked(folder, (), False, lambda line: None)
    assert differing([folder], tmp_path) == [[], []]
    capsys.readouterr()
    assert cli.main(["refresh", str(folder)]) == 0
    assert capsys.readouterr().out.endswith("nothing to do\n")
    assert contents(folder).keys() == after.keys()


def test_changed_code_is_not_lost(tmp_path):
    folder = unpacked(NAMES[0], tmp_path)
    with (folder / "hyper_connections.py").open("a") as file:
        file.write("# mine\n")
    before = contents(folder)
    with pytest.raises(ConversionError, match="hyper_connections.py is not as the conversion wrote it"):
        refresh(folder)
    assert contents(folder) == before
    refresh(folder, accept_changes=True)
    assert "# mine" not in (folder / "hyper_connections.py").read_text()


def test_one_more_shared_file_does_not_make_every_folder_fail(tmp_path, monkeypatch):
    folder, code = unpacked(NAMES[0], tmp_path), Family.code
    monkeypatch.setattr(Family, "code", lambda family, config: {**code(family, config), "new_file.py": ""})
    assert verify_checkpoint(folder).passed
    (folder / "sinkhorn.py").unlink()
    assert verify_checkpoint(folder).failure == "the code file sinkhorn.py is missing. Run `hf-hyperconn refresh`"


def test_a_newer_format_is_refused_with_what_to_do(tmp_path, capsys):
    folder = unpacked(NAMES[0], tmp_path)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hc_format": 2}))
    assert cli.main(["verify", str(folder)]) == 1
    assert "hc_format 2; this release knows formats up to 1. Install a newer" in capsys.readouterr().err
    with pytest.raises(Exception, match=r"reads formats up to 1. Update it, or load the folder with the code"):
        AutoModelForCausalLM.from_pretrained(folder)
