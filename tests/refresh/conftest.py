"""An older folder, and what is done to it in the midst of a refresh."""

import errno
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from hf_hyperconn.conversion.refresh import refresh
from hf_hyperconn.errors import ConversionError
from tests.test_golden_folders import NAMES, contents, unpacked

CHANGES = (
    *("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.chown"),
    *("open", "shutil.rmtree"),
)
SHIPPED = "modeling_hyper_connections.py"  # the other Python files are handled as this one is
WEIGHTS = "model-00001-of-00002.safetensors"


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


@pytest.fixture(scope="session")
def changes() -> Iterator[Changes]:
    found = Changes()
    yield found
    found.place = None


@pytest.fixture(scope="session")
def old(tmp_path_factory) -> Path:
    """An older folder, with a folder in a folder and an empty one."""
    folder = unpacked(NAMES[0], tmp_path_factory.mktemp("old"))
    (folder / "notes" / "mine").mkdir(parents=True)
    (folder / "notes" / "mine" / "one.txt").write_text("mine")
    (folder / "notes" / "link").symlink_to("mine/one.txt")
    (folder / "empty").mkdir()
    return folder


@pytest.fixture(scope="session")
def new(old, tmp_path_factory) -> dict[str, bytes]:
    """What it holds once it is refreshed."""
    folder = shutil.copytree(old, tmp_path_factory.mktemp("new") / "out", symlinks=True)
    refresh(folder)
    return contents(folder)


@pytest.fixture
def out(old, new, tmp_path) -> Path:
    return shutil.copytree(old, tmp_path / "place" / "out", symlinks=True)


def in_a_fork(act: Callable[[], object]) -> int:
    """Do something in a fork, and return its exit code, of its own 0 at its end and 1 for an error of ours."""
    if not (child := os.fork()):
        code = 99
        try:
            act()
            code = 0
        except ConversionError:
            code = 1
        except SystemExit as ended:
            code = int(ended.code or 0)
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def stopped(how: str, at: int, out: Path, changes: Changes, **options) -> bool:
    """Refresh OUT, stopped before the change of a number; whether there was one."""

    def attempt():
        changes.before(at, out.parent, STOPS[how])
        refresh(out, **options)

    if how == "killed":
        return in_a_fork(attempt) == 9
    with suppress(KeyboardInterrupt, ConversionError):
        attempt()
    changes.place = None
    return changes.count >= at


def kill():
    os._exit(9)


def interrupt():
    raise KeyboardInterrupt


def fail():
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


STOPS = {"killed": kill, "interrupted": interrupt, "where the disk is full": fail}
