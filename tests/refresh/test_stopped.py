"""Whatever stops a refresh, everything is kept, and the same command completes it."""

import errno
import os
import shutil
from pathlib import Path

import pytest

from hf_hyperconn.conversion import moving
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.made import MARK
from hf_hyperconn.conversion.refresh import refresh
from hf_hyperconn.errors import ConversionError
from tests.marks import few
from tests.test_golden_folders import contents

from .conftest import STOPS, WEIGHTS, in_a_fork, stopped


@pytest.mark.parametrize(
    ("how", "links"),
    few([(how, links) for how in STOPS for links in (True, False)], ("killed", True)),
)
def test_stopped_at_any_change_it_is_completed_by_the_same_command(
    how, links, old, new, changes, monkeypatch, tmp_path
):
    """links: whether the file system has them."""
    if not links:

        def refuse(*arguments, **options):
            raise OSError(errno.EPERM, "Operation not permitted")

        monkeypatch.setattr(os, "link", refuse)
    before, at = contents(old), 1
    while True:
        out = shutil.copytree(old, tmp_path / str(at) / "out", symlinks=True)
        was_stopped = stopped(how, at, out, changes)
        for folder in (out, out.with_name(".out.previous")):
            if folder.is_dir() and (folder / WEIGHTS).exists():
                assert (folder / WEIGHTS).read_bytes() == before[WEIGHTS]
        if was_stopped:
            if out.is_dir():
                assert contents(out).keys() - {MARK} in (before.keys(), new.keys()), at
            refresh(out)
        assert contents(out) == new, at
        assert os.listdir(out.parent) == ["out"], at
        assert (out / "empty").is_dir()
        assert (out / "notes" / "link").readlink() == Path("mine/one.txt")
        shutil.rmtree(out.parent)
        if not was_stopped:
            break
        at += 1
    assert at > 40


def test_of_a_folder_without_a_record_nothing_stays_either(old, changes, tmp_path):
    """As a trained model is, of which what is left of the old folder can't be told by a record."""
    at = 1
    while True:
        out = shutil.copytree(old, tmp_path / str(at) / "out", symlinks=True)
        (out / "hyperconn_conversion.json").unlink()
        (out / "mine.bin").write_bytes(b"mine")
        was_stopped = stopped("killed", at, out, changes, accept_changes=True)
        refresh(out, accept_changes=True)
        assert os.listdir(out.parent) == ["out"], at
        assert (out / "mine.bin").read_bytes() == b"mine"
        assert (out / WEIGHTS).read_bytes() == (old / WEIGHTS).read_bytes()
        assert not (out / MARK).exists()
        assert refresh(out).is_current
        shutil.rmtree(out.parent)
        if not was_stopped:
            break
        at += 2


def test_a_conversion_does_not_take_what_a_refresh_has_left(old, out, new, changes, capsys):
    stopped("killed", 20, out, changes)
    base = str(old.with_name("base"))
    assert main(["convert", base, str(out), "--force", "--discard", "--verify", "off", "-q"]) == 1
    assert f"of a refresh that was cut off. Run `hf-hyperconn refresh {out}`" in capsys.readouterr().err
    refresh(out)
    assert contents(out) == new


def test_between_the_renamings_a_dry_run_says_what_to_do(out, old, new, monkeypatch, capsys):
    rename = moving.rename_new

    def cut_off(source, target):
        if source.name == ".out.incomplete":
            os._exit(9)
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(moving, "rename_new", cut_off)
        assert in_a_fork(lambda: refresh(out)) == 9
    assert sorted(os.listdir(out.parent)) == [".out.incomplete", ".out.previous"]
    assert main(["refresh", str(out), "--dry-run"]) == 1
    assert "was cut off, and without --dry-run the same command completes it." in capsys.readouterr().err
    assert sorted(os.listdir(out.parent)) == [".out.incomplete", ".out.previous"]
    assert refresh(out).changed
    assert contents(out) == new
    assert os.listdir(out.parent) == ["out"]


def test_a_failed_exchange_is_no_dead_end(out, old, new, monkeypatch):
    def busy(source, target):
        raise OSError(errno.EBUSY, "Device or resource busy")

    with monkeypatch.context() as patch:
        patch.setattr(moving, "rename_new", busy)
        for _ in range(2):
            with pytest.raises(ConversionError, match="is as it was: Device or resource busy"):
                refresh(out)
    assert contents(out) == contents(old)
    refresh(out)
    assert contents(out) == new
    assert os.listdir(out.parent) == ["out"]
