"""What is at the places of a refresh, and isn't its own, stays; a folder that can't be replaced is said to be one."""

import json
import os
import shutil
import stat
import subprocess
import sys
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


@pytest.mark.parametrize("has_list", [True, False])
def test_where_a_disk_is_mounted(has_list, out, old, monkeypatch, tmp_path):
    mount = out / "notes" / "mine"
    if has_list:
        mounts = tmp_path / "mountinfo"
        mounts.write_text(
            f"22 1 8:1 / / rw - ext4 /dev/sda rw\n29 22 8:1 /x {str(mount).replace('i', chr(92) + '151')} rw\n"
        )
        monkeypatch.setattr("hf_hyperconn.conversion.mounts.MOUNTS", mounts)
    else:
        monkeypatch.setattr("hf_hyperconn.conversion.mounts.MOUNTS", tmp_path / "nothing")
        monkeypatch.setattr("os.path.ismount", lambda path: Path(path) == mount)
    with pytest.raises(
        ConversionError, match="notes/mine' is a mount point, and can't be replaced. Unmount it, or copy"
    ):
        refresh(out)
    assert refresh(out, dry_run=True).changed
    assert contents(out) == contents(old)
    assert os.listdir(out.parent) == ["out"]


def test_what_is_mounted_in_the_folder_stays(out):
    """A folder of the same disk, in a process with mounts of its own."""
    volume = out.with_name("volume")
    volume.mkdir()
    (volume / "data.bin").write_text("of all")
    bind = ["unshare", "-rm", "sh", "-c", f"mount --bind '{volume}' '{out}/empty' && exec \"$@\"", "sh"]
    if not shutil.which("unshare") or subprocess.run([*bind, "true"], capture_output=True).returncode:
        pytest.skip("nothing may be mounted here")
    done = subprocess.run(
        [*bind, sys.executable, "-m", "hf_hyperconn.conversion", "refresh", str(out)], capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "empty' is a mount point" in done.stderr
    assert (volume / "data.bin").read_text() == "of all"


@pytest.mark.parametrize("mode", [0o2775, 0o700, 0o555])
def test_folders_keep_their_modes(mode, out):
    folders = [out, out / "notes", out / "notes" / "mine", out / "empty"]
    for folder in folders:
        folder.chmod(mode)
    refresh(out)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [mode] * 4
    assert os.listdir(out.parent) == ["out"]


@pytest.mark.parametrize("name", ["config.json", "hyperconn_conversion.json", "modeling_hyper_connections.py"])
def test_a_link_out_of_the_folder_is_not_followed(name, out, capsys):
    outside = out.with_name("outside")
    (out / name).rename(outside)
    (out / name).symlink_to(outside)
    assert main(["refresh", str(out)]) == 1
    assert f"{name}' is a link to" in capsys.readouterr().err
    assert (out / name).is_symlink()


@pytest.mark.parametrize("has_record", [True, False])
def test_code_and_entries_of_ones_own_stay(has_record, out, new):
    config = json.loads((out / "config.json").read_text())
    own = {"AutoProcessor": "processing_mine.MyProcessor", "AutoTokenizer": [None, "tokens_mine.MyTokenizer"]}
    config["auto_map"] |= own
    (out / "config.json").write_text(json.dumps(config))
    for name in ("processing_mine.py", "tokens_mine.py"):
        (out / name).write_text("mine = 1\n")
    if not has_record:
        (out / "hyperconn_conversion.json").unlink()
    found = refresh(out, accept_changes=not has_record)
    assert "processing_mine.py" not in found.removed
    assert (out / "processing_mine.py").read_text() == (out / "tokens_mine.py").read_text() == "mine = 1\n"
    auto_map = json.loads((out / "config.json").read_text())["auto_map"]
    assert auto_map == {**json.loads(new["config.json"])["auto_map"], **own}


def test_a_config_that_was_changed_stays_known_for_it(out):
    """Else a refresh would make it what verification finds right."""
    path, record = out / "config.json", out / "hyperconn_conversion.json"
    recorded = json.loads(record.read_text())["files"]["config.json"]
    path.write_text(path.read_text().replace('"rms_norm_eps"', '"rms_norm_eps": 0.5, "was"', 1))
    refresh(out)
    assert json.loads(record.read_text())["files"]["config.json"] == recorded
