"""What is at the places of a refresh, and isn't its own, stays; a folder that can't be replaced is said to be one."""

import json
import os
import shutil
import stat
from pathlib import Path

import pytest

from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.made import MARK
from hf_hyperconn.conversion.refresh import refresh
from hf_hyperconn.errors import ConversionError
from tests.test_golden_folders import contents


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_has_the_name_of_the_workspace_stays(kind, out):
    work = out.with_name(".out.incomplete")
    work.symlink_to("out") if kind == "link" else work.touch()
    with pytest.raises(ConversionError, match="is in the way: an unfinished conversion"):
        refresh(out)
    assert os.path.lexists(work)


def test_what_a_conversion_moved_aside_is_renamed_back_by_its_owner(out):
    out.rename(out.with_name(".out.previous"))
    with pytest.raises(ConversionError, match=r"there is no folder '.*out'. What it was is '.*previous': rename it"):
        refresh(out)
    (out.with_name(".out.incomplete")).mkdir()
    (out.with_name(".out.incomplete") / MARK).touch()
    with pytest.raises(ConversionError, match="rename it back"):
        refresh(out)


def test_what_is_not_left_by_a_replacement_stays(out, old):
    previous = out.with_name(".out.previous")
    previous.mkdir()
    (previous / "thesis.txt").write_text("precious")
    with pytest.raises(ConversionError, match=r"\.out\.previous' is in the way"):
        refresh(out)
    assert contents(out) == contents(old)
    assert os.listdir(out.parent / ".out.previous") == ["thesis.txt"]
    assert sorted(os.listdir(out.parent)) == [".out.previous", "out"]


@pytest.mark.parametrize("content", ["", "[", "[]", '{"replaces": {"a": 1}}', json.dumps({"replaces": {}})])
def test_a_mark_of_others_does_no_harm(content, out, old, new):
    (out / MARK).write_text(content)
    previous = shutil.copytree(old, out.with_name(".out.previous"), symlinks=True)
    (previous / "thesis.txt").write_text("precious")
    with pytest.raises(ConversionError, match=r"\.out\.previous' is in the way"):
        refresh(out)
    assert (previous / "thesis.txt").read_text() == "precious"
    shutil.rmtree(previous)
    refresh(out)
    assert contents(out) == new


@pytest.mark.parametrize(("here", "given"), [("out", "."), ("out", "../out"), ("out/notes", "..")])
def test_the_current_folder_is_not_replaced(here, given, out, old, monkeypatch):
    monkeypatch.chdir(out.parent / here)
    with pytest.raises(ConversionError, match="is the current folder, or contains it, and another takes its place"):
        refresh(given)
    assert contents(out) == contents(old)
    assert os.listdir(out.parent) == ["out"]


def test_where_a_disk_is_mounted(out, old, monkeypatch):
    monkeypatch.setattr(Path, "is_mount", lambda path: path.name == "out")
    with pytest.raises(ConversionError, match="is a mount point, and can't be replaced. Move what is in it"):
        refresh(out)
    assert refresh(out, dry_run=True).changed
    assert contents(out) == contents(old)
    assert os.listdir(out.parent) == ["out"]


@pytest.mark.parametrize("mode", [0o2775, 0o700])
def test_folders_keep_their_modes(mode, out):
    folders = [out, out / "notes", out / "notes" / "mine", out / "empty"]
    for folder in folders:
        folder.chmod(mode)
    refresh(out)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [mode] * 4


@pytest.mark.parametrize("name", ["config.json", "hyperconn_conversion.json", "modeling_hyper_connections.py"])
def test_a_link_out_of_the_folder_is_not_followed(name, out, capsys):
    outside = out.with_name("outside")
    (out / name).rename(outside)
    (out / name).symlink_to(outside)
    assert main(["refresh", str(out)]) == 1
    assert f"{name}' is a link to" in capsys.readouterr().err
    assert (out / name).is_symlink()
