"""A refresh that is stopped anywhere keeps weights and files of others, and the same command completes it."""

import errno
import json
import os
import shutil
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

import pytest

from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.files.writing import is_part, lock
from hf_hyperconn.conversion.refresh import refresh
from hf_hyperconn.errors import ConversionError

from .marks import few
from .test_golden_folders import NAMES, contents, unpacked

CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.chmod", "os.chown", "open")
SHIPPED = "modeling_hyper_connections.py"
WEIGHTS = "model-00001-of-00002.safetensors"


class Changes:
    """Calls `act` before the change of a file or folder that has the number `at`."""

    def __init__(self):
        self.place, self.at, self.count, self.act = None, None, 0, lambda: None
        sys.addaudithook(self.hear)

    def hear(self, event: str, arguments: tuple):
        if self.place is None or event not in CHANGES or isinstance(arguments[0], int):
            return
        if event == "open" and not arguments[2] & (os.O_WRONLY | os.O_RDWR):
            return
        if os.fsdecode(arguments[0]).startswith(self.place):
            self.count += 1
            if self.count == self.at:
                self.place = None
                self.act()

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
    """The contents of the folder once it is refreshed."""
    folder = shutil.copytree(old, tmp_path_factory.mktemp("new") / "out", symlinks=True)
    refresh(folder)
    return contents(folder)


@pytest.fixture
def out(old, new, tmp_path) -> Path:
    return shutil.copytree(old, tmp_path / "place" / "out", symlinks=True)


def kill():
    os._exit(9)


def interrupt():
    raise KeyboardInterrupt


def fail():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


STOPS = {"killed": kill, "interrupted": interrupt, "where the disk is full": fail}


def stopped(how: str, at: int, out: Path, changes: Changes, **options) -> bool:
    """Refresh OUT, stopped before the change of a number; whether there was one."""

    def attempt():
        changes.before(at, out.parent, STOPS[how])
        refresh(out, **options)

    if how == "killed":
        if not (child := os.fork()):
            try:
                attempt()
                os._exit(0)
            finally:
                os._exit(99)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code in (0, 9)
        return code == 9
    with suppress(KeyboardInterrupt, ConversionError):
        attempt()
    changes.place = None
    return changes.count >= at


@pytest.mark.parametrize("how", few(STOPS, "killed"))
def test_stopped_at_any_change_it_is_completed_by_the_same_command(how, old, new, changes, tmp_path):
    before, at, step = contents(old), 1, 3
    while True:
        out = shutil.copytree(old, tmp_path / str(at) / "out", symlinks=True)
        was_stopped = stopped(how, at, out, changes)
        if was_stopped:
            left = {name: content for name, content in contents(out).items() if not is_part(name)}
            assert all(content in (before.get(name), new.get(name)) for name, content in left.items()), at
            assert before.keys() & new.keys() <= left.keys(), at
            refresh(out)
        assert contents(out) == new, at
        assert os.listdir(out.parent) == ["out"], at
        assert (out / "empty").is_dir()
        assert (out / "notes" / "link").readlink() == Path("mine/one.txt")
        shutil.rmtree(out.parent)
        if not was_stopped:
            break
        at += step
    assert at > 40


def test_a_full_disk_changes_nothing(out, old, monkeypatch):
    """Until all files are written, and are renamed then."""
    monkeypatch.setattr("hf_hyperconn.conversion.files.writing._create", lambda path, mode: fail())
    with pytest.raises(ConversionError, match="was not refreshed: No space left on device. Fix that, and run"):
        refresh(out)
    assert contents(out) == contents(old)


def test_a_folder_without_a_record_is_completed_too(old, changes, tmp_path):
    """As a trained model is."""
    for at in range(1, 60, 9):
        out = shutil.copytree(old, tmp_path / str(at) / "out", symlinks=True)
        (out / "hyperconn_conversion.json").unlink()
        (out / "mine.bin").write_bytes(b"mine")
        stopped("killed", at, out, changes, accept_changes=True)
        refresh(out, accept_changes=True)
        assert (out / "mine.bin").read_bytes() == b"mine"
        assert (out / WEIGHTS).read_bytes() == (old / WEIGHTS).read_bytes()
        assert refresh(out).is_current


def test_while_another_command_works_in_the_folder_it_is_refused(out, old, capsys):
    with lock(out):
        assert main(["refresh", str(out)]) == 1
    assert "another conversion is working in" in capsys.readouterr().err
    assert contents(out) == contents(old)


@pytest.mark.parametrize(("here", "given"), [("out", "."), ("out", "../out"), ("out/notes", "..")])
def test_the_current_folder_is_refreshed(here, given, out, new, monkeypatch):
    monkeypatch.chdir(out.parent / here)
    refresh(given)
    assert contents(out) == new


@pytest.mark.parametrize("mode", [0o2775, 0o700])
def test_folders_and_files_keep_their_modes(mode, out):
    folders = [out, out / "notes", out / "notes" / "mine", out / "empty"]
    for folder in folders:
        folder.chmod(mode)
    (out / SHIPPED).chmod(0o640)
    refresh(out)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in folders] == [mode] * 4
    assert stat.S_IMODE((out / SHIPPED).stat().st_mode) & 0o007 == 0


def test_files_that_others_link_to_stay_as_they_are(out, old):
    """As in a copy by hard links."""
    twin = shutil.copytree(out, out.with_name("twin"), copy_function=os.link, symlinks=True)
    refresh(out)
    assert contents(twin) == contents(old)


@pytest.mark.parametrize("name", ["config.json", "hyperconn_conversion.json", SHIPPED])
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


@pytest.mark.parametrize("name", [SHIPPED, "connection.py"])
def test_code_of_a_trained_model_is_not_lost(name, out, old):
    """Of which no digest was recorded; also a file of one's own that has the name of a new one."""
    (out / "hyperconn_conversion.json").unlink()
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "hc_version": "0.0.9"}))
    with (out / name).open("a") as file:
        file.write("# mine\n")
    before = contents(out)
    with pytest.raises(
        ConversionError, match=r"whether somebody has changed .*\.py.* is not recorded. Save a copy of it"
    ):
        refresh(out)
    assert contents(out) == before
    assert refresh(out, accept_changes=True).changed


def test_code_that_nothing_imports_any_more_is_not_lost(out):
    """Recorded, and changed since."""
    record = out / "hyperconn_conversion.json"
    facts = json.loads(record.read_text())
    facts["files"]["unused.py"] = sha256(b"of the conversion").hexdigest()
    record.write_text(json.dumps(facts))
    (out / "unused.py").write_text("mine")
    with pytest.raises(ConversionError, match="unused.py is not as the conversion wrote it"):
        refresh(out)
    (out / "unused.py").write_text("of the conversion")
    assert "unused.py" in refresh(out).removed
    assert not (out / "unused.py").exists()


def test_there_is_no_such_folder(tmp_path):
    with pytest.raises(ConversionError, match="there is no folder '.*nothing'. Give the folder of a checkpoint."):
        refresh(tmp_path / "nothing")
