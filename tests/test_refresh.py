"""A refresh keeps everything, whatever stops it and whatever else runs, and the same command completes it."""

import errno
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hf_hyperconn.conversion import moving
from hf_hyperconn.conversion import refresh as module
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.made import MARK
from hf_hyperconn.conversion.refresh import refresh
from hf_hyperconn.errors import ConversionError

from .marks import few
from .test_golden_folders import NAMES, contents, unpacked

CHANGES = (
    *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.chown"),
    *("open", "shutil.rmtree"),
)
WEIGHTS = "model-00001-of-00002.safetensors"
SHIPPED = "modeling_hyper_connections.py"  # the other Python files are handled as this one is


class Changes:
    """Calls `act` before the change of a file or folder that has the number `at`."""

    def __init__(self):
        self.place, self.at, self.count, self.act = None, None, 0, lambda: None
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple):
        if self.place is None or event not in CHANGES or not self.is_counted(event, arguments):
            return
        self.count += 1
        if self.count == self.at:
            self.place = None
            self.act()

    def is_counted(self, event: str, arguments: tuple) -> bool:
        path = os.fsdecode(arguments[0]) if not isinstance(arguments[0], int) else ""
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return False
        is_of_another = ".py" in path and SHIPPED not in path
        return not is_of_another and (path.startswith(self.place) or not path.startswith("/"))

    def before(self, at: int, place: Path, act: Callable[[], None]):
        self.place, self.at, self.count, self.act = str(place), at, 0, act


@pytest.fixture(scope="module")
def changes() -> Iterator[Changes]:
    found = Changes()
    yield found
    found.place = None


@pytest.fixture(scope="module")
def old(tmp_path_factory) -> Path:
    """An older folder, with a folder in a folder and an empty one."""
    folder = unpacked(NAMES[0], tmp_path_factory.mktemp("old"))
    (folder / "notes" / "mine").mkdir(parents=True)
    (folder / "notes" / "mine" / "one.txt").write_text("mine")
    (folder / "notes" / "link").symlink_to("mine/one.txt")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(scope="module")
def new(old, tmp_path_factory) -> dict[str, bytes]:
    """What it holds once it is refreshed."""
    folder = shutil.copytree(old, tmp_path_factory.mktemp("new") / "out", symlinks=True)
    refresh(folder)
    return contents(folder)


@pytest.fixture
def out(old, new, tmp_path) -> Path:
    return shutil.copytree(old, tmp_path / "place" / "out", symlinks=True)


def in_a_fork(act: Callable[[], object]) -> int:
    """Do something in a fork, and return its exit code: 0 when it came to its end, 1 for an error of ours."""
    if not (child := os.fork()):
        code = 99
        try:
            act()
            code = 0
        except ConversionError:
            code = 1
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def interrupt():
    raise KeyboardInterrupt


def stopped(how: str, at: int, out: Path, changes: Changes, **options) -> bool:
    """Refresh OUT, stopped before the change of a number; whether there was one."""

    def attempt():
        changes.before(at, out.parent, interrupt if how == "interrupted" else lambda: os._exit(9))
        refresh(out, **options)

    try:
        if how == "killed":
            return in_a_fork(attempt) == 9
        attempt()
    except KeyboardInterrupt:
        return True
    finally:
        changes.place = None
    return False


@pytest.mark.parametrize(
    ("how", "links"),
    few([(how, links) for how in ("killed", "interrupted") for links in (True, False)], ("killed", True)),
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
    if not (child := os.fork()):
        code = 99
        try:
            code = main(command)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


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


@pytest.mark.parametrize("kind", ["link", "file"])
def test_what_has_the_name_of_the_workspace_stays(kind, out):
    work = out.with_name(".out.incomplete")
    work.symlink_to("out") if kind == "link" else work.touch()
    with pytest.raises(ConversionError, match="is in the way: an unfinished conversion"):
        refresh(out)
    assert os.path.lexists(work)


def test_a_conversion_does_not_take_what_a_refresh_has_left(old, out, new, changes, capsys):
    stopped("killed", 20, out, changes)
    base = str(old.with_name("base"))
    assert main(["convert", base, str(out), "--force", "--discard", "--verify", "off", "-q"]) == 1
    assert f"of a refresh that was cut off. Run `hf-hyperconn refresh {out}`" in capsys.readouterr().err
    refresh(out)
    assert contents(out) == new


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


@pytest.mark.parametrize("mode", [0o2775, 0o700])
def test_folders_keep_their_modes(mode, out):
    folders = [out, out / "notes", out / "notes" / "mine", out / "empty"]
    for folder in folders:
        folder.chmod(mode)
    refresh(out)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [mode] * 4


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


@pytest.mark.parametrize("name", ["config.json", "hyperconn_conversion.json", "modeling_hyper_connections.py"])
def test_a_link_out_of_the_folder_is_not_followed(name, out, capsys):
    outside = out.with_name("outside")
    (out / name).rename(outside)
    (out / name).symlink_to(outside)
    assert main(["refresh", str(out)]) == 1
    assert f"{name}' is a link to" in capsys.readouterr().err
    assert (out / name).is_symlink()
