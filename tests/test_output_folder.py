"""OUT: nothing that is there is deleted, whatever happens meanwhile; the conversion appears whole or not at all."""

import errno
import json
import os
import re
import shutil
from datetime import datetime
from pathlib import Path

import pytest

from hf_hyperconn.conversion import convert
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.files import writing
from hf_hyperconn.conversion.planning import output_folder
from hf_hyperconn.conversion.planning.output_folder import OutputFolder
from hf_hyperconn.conversion.planning.plan import plan_conversion
from hf_hyperconn.errors import ConversionError, HyperConnError

from .marks import few
from .test_golden_folders import contents

BROUGHT = "model-00001-of-00002.safetensors"
ASIDE = re.compile(r"out\.replaced-\d{8}-\d{6}(-\d+)?")


def streams(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["hc_mult"]


@pytest.fixture
def out(source, tmp_path) -> Path:
    """A conversion of two streams."""
    return converted(source, tmp_path / "out", hc_mult=2)


def converted(source: Path | str, out: Path | str, **options) -> Path:
    return convert_checkpoint(str(source), out, **{"verify": "structure", **options}).path


def aside(place: Path) -> list[Path]:
    """What was renamed, in the order of the renaming."""
    return sorted(path for path in place.iterdir() if ASIDE.fullmatch(path.name))


@pytest.fixture
def meanwhile(monkeypatch):
    """Does something when a conversion is about to get its name."""

    def prepare(act):
        def then(plan, work):
            monkeypatch.undo()
            act()
            return publish(plan, work)

        publish = convert._publish
        monkeypatch.setattr(convert, "_publish", then)

    return prepare


def thesis(out: Path):
    out.mkdir()
    (out / "thesis.txt").write_text("precious")


@pytest.mark.parametrize("link", ["copy", "hard", "symlink"])
def test_force_renames_what_is_there(link, source, out, tmp_path, capsys):
    """Also files of the user's, trained weights, and links in it."""
    (out / "thesis.txt").write_text("precious")
    (out / "link").symlink_to("/nowhere")
    (out / BROUGHT).write_bytes(b"a week of training")
    before = contents(out)
    assert main(["convert", str(source), str(out), "-n", "3", "--force", "--verify", "off", "--link", link]) == 0
    (old,) = aside(tmp_path)
    assert f"the old '{out}' to '{old.name}'" in capsys.readouterr().err
    assert contents(old) == before
    assert (old / "link").is_symlink()
    assert streams(out) == 3
    assert sorted(os.listdir(tmp_path)) == ["base", "out", old.name]


@pytest.mark.parametrize("make", [thesis, Path.mkdir, Path.touch], ids=["a folder of another", "empty", "a file"])
def test_force_renames_anything(make, source, tmp_path):
    make(tmp_path / "out")
    with pytest.raises(ConversionError, match="already exists. Choose another OUT, or rename the old one by --force"):
        converted(source, tmp_path / "out")
    converted(source, tmp_path / "out", force=True)
    (old,) = aside(tmp_path)
    assert old.is_file() == (make is Path.touch)
    assert (old / "thesis.txt").exists() == (make is thesis)


def test_a_script_is_told_the_new_name(source, out, tmp_path, capsys):
    assert main(["convert", str(source), str(out), "--force", "--verify", "off", "--json"]) == 0
    assert [json.loads(capsys.readouterr().out)["renamed"]] == [str(path) for path in aside(tmp_path)]
    assert main(["convert", str(source), str(tmp_path / "new"), "--verify", "off", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["renamed"] is None


def test_twice_in_a_second_gives_two_names(source, out, tmp_path, monkeypatch):
    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return datetime(2026, 1, 2, 3, 4, 5)

    monkeypatch.setattr(output_folder, "datetime", Clock)
    for n in (3, 4):
        converted(source, out, hc_mult=n, force=True)
    stem = "out.replaced-20260102-030405"
    assert [path.name for path in aside(tmp_path)] == [stem, f"{stem}-2"]
    assert [streams(path) for path in (*aside(tmp_path), out)] == [2, 3, 4]


def test_the_plan_says_what_is_renamed(source, out):
    plan = plan_conversion(str(source), out, force=True)
    assert plan.as_dict()["replaces"]
    assert re.search(r"renames +the old one to out\.replaced-<time>", plan.describe())
    assert not plan_conversion(str(source), out.with_name("new")).as_dict()["replaces"]


@pytest.mark.parametrize("force", few((False, True), True))
@pytest.mark.parametrize(
    "appears",
    [thesis, Path.mkdir, Path.touch, lambda out: out.symlink_to("nowhere")],
    ids=["full", "empty", "file", "link"],
)
def test_what_appears_meanwhile_stays(appears, force, source, meanwhile, tmp_path):
    out, options = tmp_path / "out", {"hc_mult": 3, "verify": "full", "force": force}
    meanwhile(lambda: appears(out))
    with pytest.raises(ConversionError, match="has appeared meanwhile and is not replaced. Move it away"):
        converted(source, out, **options)
    assert [path.name for path in out.iterdir()] == ["thesis.txt"] * (appears is thesis) if out.is_dir() else True
    assert os.path.lexists(out)
    waiting = contents(tmp_path / ".out.incomplete")

    out.rename(tmp_path / "away")
    assert converted(source, out, **options) == out
    del waiting[convert.PLAN]
    assert contents(out) == waiting
    assert sorted(os.listdir(tmp_path)) == ["away", "base", "out"]


def test_what_comes_between_the_look_and_the_renaming_stays(source, monkeypatch, tmp_path):
    folder = OutputFolder(tmp_path / "new")
    thesis(folder.work)
    thesis(folder.path)
    monkeypatch.setattr(OutputFolder, "refuse_newcomer", lambda self: None)
    with pytest.raises(OSError, match="not empty"):
        folder.publish()
    assert sorted(os.listdir(tmp_path)) == [".new.incomplete", "base", "new"]


@pytest.fixture
def finished(source, meanwhile, tmp_path):
    """Makes a conversion that waits for its name, and returns OUT, which is free again."""

    def make(**options) -> Path:
        out = tmp_path / "out"
        meanwhile(out.mkdir)
        with pytest.raises(ConversionError, match="has appeared"):
            converted(source, out, **options)
        out.rmdir()
        return out

    return make


def test_a_finished_conversion_is_not_verified_again(source, finished, monkeypatch, tmp_path):
    out = finished(verify="full")
    with monkeypatch.context() as patch:
        patch.setattr(convert, "verify_checkpoint", lambda *arguments, **options: pytest.fail("verified again"))
        result = convert_checkpoint(str(source), out, verify="full")
    assert result.verification == convert_checkpoint(str(source), tmp_path / "other", verify="full").verification


def test_a_finished_conversion_is_verified_again_if_its_base_has_changed(source, finished, monkeypatch):
    out = finished(verify="full")
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[:-4] + bytes(4))
    verify, verified = convert.verify_checkpoint, []
    monkeypatch.setattr(
        convert, "verify_checkpoint", lambda *a, **options: verified.append(a) or verify(*a, **options)
    )
    assert converted(source, out, verify="full") == out
    assert len(verified) == 1
    assert (out / BROUGHT).read_bytes() == data[:-4] + bytes(4)


@pytest.mark.parametrize("failure", [OSError(errno.EBUSY, "Device or resource busy"), KeyboardInterrupt()])
def test_the_old_one_gets_its_name_back_when_the_new_one_can_not_have_it(failure, source, out, monkeypatch, tmp_path):
    before, rename = contents(out), os.rename

    def fail(old, new):
        if Path(old).name == ".out.incomplete":
            raise failure
        rename(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with pytest.raises((HyperConnError, KeyboardInterrupt)):
            converted(source, out, hc_mult=3, force=True)
    assert contents(out) == before
    assert sorted(os.listdir(tmp_path)) == [".out.incomplete", "base", "out"]
    assert streams(converted(source, out, hc_mult=3, force=True)) == 3


@pytest.mark.parametrize("force", [False, True])
def test_two_processes_convert_to_one_name(force, source, tmp_path):
    """The first is stopped just before its end, the second comes, and the first goes on."""
    out = tmp_path / "out"
    if force:
        converted(source, out, hc_mult=1)
    (stopped, stop), (waiting, go_on) = os.pipe(), os.pipe()
    if not (child := os.fork()):
        code = 99
        try:
            publish = convert._publish

            def wait(plan, work):
                os.write(stop, b".")
                os.read(waiting, 1)
                return publish(plan, work)

            convert._publish = wait
            code = main(["convert", str(source), str(out), "-n", "2", "-q", "--verify", "off", *["--force"] * force])
        finally:
            os._exit(code)
    try:
        assert os.read(stopped, 1) == b"."
        with pytest.raises(ConversionError, match="another conversion is working in"):
            converted(source, out, hc_mult=3, force=force)
    finally:
        os.write(go_on, b".")
        status = os.waitpid(child, 0)[1]
    assert os.waitstatus_to_exitcode(status) == 0
    assert streams(out) == 2
    assert [streams(path) for path in aside(tmp_path)] == [1] * force
    assert not (tmp_path / ".out.incomplete").exists()


def test_what_another_command_works_in_is_not_renamed(source, out, tmp_path):
    """As a refresh, which writes by the names of files in it."""
    before = contents(out)
    with (
        writing.lock(out),
        pytest.raises(ConversionError, match="another conversion is working in '.*out', or a"),
    ):
        converted(source, out, hc_mult=3, force=True)
    assert contents(out) == before
    assert streams(converted(source, out, hc_mult=3, force=True)) == 3


def test_a_conversion_killed_just_before_its_name_is_kept(source, monkeypatch, tmp_path):
    """From another conversion, which would work in the same folder."""

    def die(self):
        raise SystemExit

    with monkeypatch.context() as patch:
        patch.setattr(OutputFolder, "publish", die)
        with pytest.raises(SystemExit):
            converted(source, tmp_path / "out", hc_mult=3)
    with pytest.raises(ConversionError, match="holds a finished conversion of another base or with other arguments"):
        converted(source, tmp_path / "out", hc_mult=2)
    assert streams(converted(source, tmp_path / "out", hc_mult=3)) == 3
    assert not (tmp_path / "out" / convert.PLAN).exists()


def test_a_lock_on_what_has_its_name_meanwhile_is_none(tmp_path, monkeypatch):
    """Between opening a folder and holding it, the conversion in it may end."""
    work = tmp_path / "work"
    work.mkdir()
    opened = os.open

    def late(path, *arguments, **options):
        descriptor = opened(path, *arguments, **options)
        work.rename(tmp_path / "out")
        return descriptor

    monkeypatch.setattr(writing.os, "open", late)
    with pytest.raises(FileNotFoundError):
        writing.lock(work)


def test_where_a_file_system_has_no_locks(source, monkeypatch, tmp_path):
    def refuse(descriptor, operation):
        raise OSError(errno.EBADF, "Bad file descriptor")  # as NFS does for folders

    monkeypatch.setattr("fcntl.flock", refuse)
    out = converted(source, tmp_path / "out", hc_mult=2)
    assert streams(converted(source, out, hc_mult=3, force=True)) == 3


@pytest.mark.parametrize("kind", ["folder", "link", "file"])
def test_what_has_the_name_of_the_workspace_stays(kind, source, tmp_path):
    work, mine = tmp_path / ".out.incomplete", tmp_path / "mine"
    thesis(mine)
    {"folder": mine.rename, "link": lambda path: path.symlink_to(mine), "file": Path.touch}[kind](work)
    with pytest.raises(ConversionError, match=r"\.out\.incomplete', where the conversion works, exists and was not"):
        converted(source, tmp_path / "out")
    assert work.is_symlink() == (kind == "link")
    if kind != "file":
        assert contents(work) == {"thesis.txt": b"precious"}
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("lies", ["base", "through a link", "linked weights", "out itself"])
def test_a_source_in_out(lies, force, source, out, tmp_path):
    """`base`: as when a base was moved into the folder of its conversion."""
    inside = out / "base"
    shutil.copytree(source, inside)
    given = inside
    if lies == "through a link":
        given = tmp_path / "link"
        given.symlink_to(inside)
    elif lies == "linked weights":
        given = shutil.copytree(source, tmp_path / "linked")
        (given / "model.safetensors").unlink()
        (given / "model.safetensors").symlink_to(inside / "model.safetensors")
    elif lies == "out itself":
        given = shutil.copytree(source, out, dirs_exist_ok=True)
    before = contents(out)
    with pytest.raises(ConversionError, match="lie in '.*out', which a conversion to '.*' would replace"):
        converted(given, out, force=force, link="symlink")
    assert contents(out) == before


@pytest.mark.parametrize("given", [".", "..", "../..", "", "/", "sub/.."])
@pytest.mark.parametrize("force", [False, True])
def test_a_folder_that_one_is_in(given, force, source, tmp_path, monkeypatch, capsys):
    here = tmp_path / "models" / "here"
    (here / "sub").mkdir(parents=True)
    monkeypatch.chdir(here)
    assert main(["convert", str(source), given, *["--force"] * force]) == 1
    assert "is the current folder, or contains it. Give a folder to create." in capsys.readouterr().err
    assert [path.name for path in tmp_path.rglob(".*")] == []


def test_where_a_disk_is_mounted(source, tmp_path, monkeypatch):
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr("os.path.ismount", lambda path: Path(path).name == "disk")
    with pytest.raises(ConversionError, match="is a mount point, and can't be renamed"):
        converted(source, tmp_path / "disk", force=True)


@pytest.mark.parametrize("dangling", [False, True])
def test_out_is_a_link(dangling, source, tmp_path):
    """It stands for the folder that it leads to, at the first run and at every later one."""
    (tmp_path / "disk").mkdir()
    link, target = tmp_path / "out", tmp_path / "disk" / "model"
    link.symlink_to(target)
    if not dangling:
        converted(source, target)
    for n in (2, 3, 5):
        assert converted(source, link, hc_mult=n, force=n > 2 or not dangling) == link
        assert link.is_symlink()
        assert streams(target) == n
    assert len(os.listdir(tmp_path / "disk")) == 3 + (not dangling)
    assert sorted(os.listdir(tmp_path)) == ["base", "disk", "out"]
    with pytest.raises(ConversionError, match="already exists"):
        converted(source, link)


def test_out_is_a_link_that_leads_nowhere(source, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "nothing" / "model")
    with pytest.raises(ConversionError, match="there is no folder '.*nothing' to write 'model' in. Create it, or"):
        converted(source, tmp_path / "out")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConversionError, match="is a link that leads to itself"):
        converted(source, tmp_path / "loop", force=True)
