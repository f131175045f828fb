"""Whatever else runs during a refresh, everything is kept, and the other one says what to do."""

import os
import shutil
import sys

import pytest

from hf_hyperconn.conversion import moving
from hf_hyperconn.conversion import refresh as module
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.made import MARK
from hf_hyperconn.conversion.refresh import refresh
from hf_hyperconn.errors import ConversionError
from tests.marks import few
from tests.test_golden_folders import contents

from .conftest import WEIGHTS, in_a_fork


@pytest.mark.parametrize("other", few(["refresh", "convert"], "refresh"))
def test_another_command_at_any_change_is_refused(other, old, new, changes, tmp_path):
    """The first one completes as if it was alone."""
    commands = {
        "refresh": lambda out: ["refresh", str(out), "-q"],
        "convert": lambda out: ["convert", str(old.with_name("base")), str(out), "--force", "--discard", "-q"],
    }
    step, at = (3, 1) if other == "refresh" else (9, 3)  # once the folder to work in is held
    while True:
        out, codes = shutil.copytree(old, tmp_path / str(at) / "out", symlinks=True), []
        command = [*commands[other](out), *["--verify", "off"] * (other == "convert")]
        changes.before(at, out.parent, lambda command=command, codes=codes: codes.append(in_another(command)))
        refresh(out)
        changes.place = None
        assert contents(out) == new, at
        if other == "convert" and codes and os.listdir(out.parent) != ["out"]:
            assert in_another(command) == 0, at  # refused when it was finished, and waiting for its name
        assert os.listdir(out.parent) == ["out"], at
        if not codes:
            break
        assert codes == [1], at
        shutil.rmtree(out.parent)
        at += step
    assert at > 40


@pytest.mark.parametrize("is_made", [False, True])
def test_a_conversion_that_comes_first_to_the_workspace_has_it(is_made, old, out, monkeypatch):
    """Before the folder to work in is made, or before it is held. The conversion waits for its name then."""
    command = ["convert", str(old.with_name("base")), str(out), "--force", "--discard", "--verify", "off", "-q"]
    make, codes, work = module.make_folder, [], out.with_name(".out.incomplete")

    def with_another(path, like):
        if is_made:
            make(path, like)
        if path == work:
            codes.append(in_another(command))
        if not is_made:
            make(path, like)

    with monkeypatch.context() as patch:
        patch.setattr(module, "make_folder", with_another)
        with pytest.raises(ConversionError, match="is in the way: an unfinished conversion"):
            refresh(out)
    assert codes == [1]
    assert contents(out) == contents(old)
    assert not (work / MARK).exists()
    assert in_another(command) == 0
    assert os.listdir(out.parent) == ["out"]


def in_another(command: list[str]) -> int:
    """The exit code of a command in a fork."""
    return in_a_fork(lambda: sys.exit(main(command)))


@pytest.mark.parametrize("moment", ["_make", "_check_complete", "put_in_place", "_unmark"])
def test_a_second_one_says_what_to_do(moment, out, new, monkeypatch, capsys):
    do, codes = getattr(module, moment), []

    def with_another(*arguments, **options):
        codes.append(main(["refresh", str(out)]))
        return do(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(module, moment, with_another)
        refresh(out)
    assert codes == [1]
    assert "another conversion is working in" in (error := capsys.readouterr().err)
    assert "Wait for it, then run this again." in error
    assert contents(out) == new
    assert os.listdir(out.parent) == ["out"]


def test_a_conversion_at_work_is_not_called_unfinished(out):
    work = out.with_name(".out.incomplete")
    work.mkdir()
    (work / ".hyperconn_plan.json").write_text("{}")
    with moving.held(work), pytest.raises(ConversionError, match="another conversion is working in"):
        refresh(out)
    with pytest.raises(ConversionError, match="is in the way: an unfinished conversion"):
        refresh(out)
    assert os.listdir(work) == [".hyperconn_plan.json"]


def test_what_is_taken_from_the_new_folder_keeps_the_old_one(out, old, new, monkeypatch):
    link = module._link

    def lossy(place, names):
        link(place, names)
        (place.work / WEIGHTS).unlink()

    with monkeypatch.context() as patch:
        patch.setattr(module, "_link", lossy)
        with pytest.raises(ConversionError, match="was changed by others, and '.*out' stays. Run this again."):
            refresh(out)
    assert contents(out) == contents(old)
    refresh(out)
    assert contents(out) == new


def test_what_comes_into_the_old_folder_stays(out, new, monkeypatch, capsys):
    """While it is removed: the next refresh doesn't remove it either."""
    remove, previous = moving._remove, out.with_name(".out.previous")

    def with_another(folder, files):
        (folder / "thesis.txt").write_text("precious")
        remove(folder, files)

    with monkeypatch.context() as patch:
        patch.setattr(moving, "_remove", with_another)
        assert main(["refresh", str(out)]) == 0
    assert ".out.previous' is still there; remove it if you don't need it." in capsys.readouterr().err
    assert refresh(out).is_current
    assert (previous / "thesis.txt").read_text() == "precious"
    assert contents(out) == new
