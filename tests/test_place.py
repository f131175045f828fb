"""OUT: a conversion replaces nothing but what it was told to, whatever happens meanwhile."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest

from hf_hyperconn.conversion import convert, moving
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.convert import carry_out, convert_checkpoint
from hf_hyperconn.conversion.moving import rename_new
from hf_hyperconn.conversion.place import Place
from hf_hyperconn.conversion.plan import plan_conversion
from hf_hyperconn.errors import ConversionError, HyperConnError

from .marks import few


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def streams(folder: Path) -> int:
    return json.loads((folder / "config.json").read_text())["hc_mult"]


@pytest.fixture
def source(llama_folder, tmp_path) -> Path:
    return shutil.copytree(llama_folder, tmp_path / "base")


@pytest.fixture
def out(source, tmp_path) -> Path:
    """A conversion of two streams."""
    return converted(source, tmp_path / "out", hc_mult=2)


def converted(source: Path, out: Path, **options) -> Path:
    return convert_checkpoint(str(source), out, **{"verify": "structure", **options}).path


@pytest.fixture
def meanwhile(monkeypatch):
    """Does something when a conversion is about to get its name."""

    def prepare(act):
        def then(plan, work):
            monkeypatch.undo()
            act()
            return put(plan, work)

        put = convert._put_in_place
        monkeypatch.setattr(convert, "_put_in_place", then)

    return prepare


def thesis(out: Path):
    out.mkdir()
    (out / "thesis.txt").write_text("precious")


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


def test_a_finished_conversion_is_not_verified_again(source, meanwhile, monkeypatch, tmp_path):
    out = tmp_path / "out"
    meanwhile(out.mkdir)
    with pytest.raises(ConversionError, match="has appeared"):
        converted(source, out, verify="full")
    out.rmdir()
    with monkeypatch.context() as patch:
        patch.setattr(convert, "verify_checkpoint", lambda *arguments, **options: pytest.fail("verified again"))
        result = convert_checkpoint(str(source), out, verify="full")
    assert result.verification == convert_checkpoint(str(source), tmp_path / "other", verify="full").verification


def test_a_finished_conversion_is_verified_again_if_its_base_has_changed(source, meanwhile, monkeypatch, tmp_path):
    out = tmp_path / "out"
    meanwhile(out.mkdir)
    with pytest.raises(ConversionError, match="has appeared"):
        converted(source, out, verify="full")
    out.rmdir()
    data = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(data[:-4] + bytes(4))
    verify, verified = convert.verify_checkpoint, []
    monkeypatch.setattr(
        convert, "verify_checkpoint", lambda *a, **options: verified.append(a) or verify(*a, **options)
    )
    assert converted(source, out, verify="full") == out
    assert len(verified) == 1
    assert (out / "model-00001-of-00002.safetensors").read_bytes() == data[:-4] + bytes(4)


def test_a_finished_conversion_is_not_lost_to_another(source, meanwhile, tmp_path):
    out = tmp_path / "out"
    meanwhile(out.mkdir)
    with pytest.raises(ConversionError, match="has appeared"):
        converted(source, out, hc_mult=3)
    out.rmdir()
    with pytest.raises(ConversionError, match="holds a finished conversion of another base or with other arguments"):
        converted(source, out, hc_mult=2)
    assert streams(converted(source, out, hc_mult=3)) == 3


def test_what_changes_meanwhile_is_not_replaced(source, out, meanwhile, tmp_path):
    meanwhile(lambda: (out / "trained.safetensors").write_bytes(b"a week of training"))
    with pytest.raises(ConversionError, match="has changed meanwhile and is not replaced"):
        converted(source, out, hc_mult=3, force=True)
    assert streams(out) == 2
    assert (out / "trained.safetensors").read_bytes() == b"a week of training"
    (out / "trained.safetensors").unlink()
    assert streams(converted(source, out, hc_mult=3, force=True)) == 3
    assert sorted(os.listdir(tmp_path)) == ["base", "out"]


def test_another_s_result_is_not_replaced(source, out, meanwhile, tmp_path):
    """A conversion that finished meanwhile, under the name that this one wants."""
    plan = plan_conversion(str(source), out, fields={"hc_mult": 3}, force=True)
    assert streams(converted(source, out, hc_mult=4, force=True)) == 4
    with pytest.raises(ConversionError, match="has changed meanwhile"):
        carry_out(plan, verify="structure")
    assert streams(out) == 4

    plan = plan_conversion(str(source), tmp_path / "new", fields={"hc_mult": 3})
    converted(source, tmp_path / "new", hc_mult=4)
    with pytest.raises(ConversionError, match="has appeared meanwhile"):
        carry_out(plan, verify="structure")
    assert streams(tmp_path / "new") == 4


@pytest.mark.parametrize("failure", [OSError(errno.EBUSY, "Device or resource busy"), KeyboardInterrupt()])
def test_what_is_replaced_comes_back_when_the_new_one_can_not_be_put_there(
    failure, source, out, monkeypatch, tmp_path
):
    before = contents(out)

    def fail(old, new):
        if old.name == ".out.incomplete":
            raise failure
        rename_new(old, new)

    with monkeypatch.context() as patch:
        patch.setattr(moving, "rename_new", fail)
        with pytest.raises((HyperConnError, KeyboardInterrupt)):
            converted(source, out, hc_mult=3, force=True)
    assert contents(out) == before
    assert sorted(os.listdir(tmp_path)) == [".out.incomplete", "base", "out"]
    assert streams(converted(source, out, hc_mult=3, force=True)) == 3
    assert sorted(os.listdir(tmp_path)) == ["base", "out"]


def test_what_takes_the_name_while_replacing_stays(source, out, monkeypatch, tmp_path):
    before = contents(out)

    def surprised(old, new):
        rename_new(old, new)
        if new.name == ".out.previous":
            thesis(out)

    monkeypatch.setattr(moving, "rename_new", surprised)
    with pytest.raises(
        ConversionError, match=r"What it was is '.*\.out\.previous'; the finished conversion is '.*incomplete'"
    ):
        converted(source, out, hc_mult=3, force=True)
    assert contents(tmp_path / ".out.previous") == before
    assert contents(out) == {"thesis.txt": b"precious"}
    assert streams(tmp_path / ".out.incomplete") == 3


@pytest.mark.parametrize("system", [True, False])
def test_renaming_replaces_nothing(system, monkeypatch, tmp_path):
    if not system:
        monkeypatch.setattr(moving, "_renamed_exclusively", lambda source, target: False)
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "file").write_text("new")
    for name, make in {"full": thesis, "empty": Path.mkdir, "file": Path.touch}.items():
        make(tmp_path / name)
        with pytest.raises(FileExistsError):
            rename_new(tmp_path / "new", tmp_path / name)
    (tmp_path / "link").symlink_to("nowhere")
    with pytest.raises(FileExistsError):
        rename_new(tmp_path / "new", tmp_path / "link")
    with pytest.raises(FileNotFoundError):
        rename_new(tmp_path / "nothing", tmp_path / "other")
    rename_new(tmp_path / "new", tmp_path / "free")
    assert contents(tmp_path / "free") == {"file": b"new"}


def test_a_folder_of_an_image_is_said_to_be_one(source, out, monkeypatch, tmp_path, capsys):
    """Overlay file systems can't rename what is in a lower layer."""

    def refuse(*arguments):
        raise OSError(errno.EXDEV, os.strerror(errno.EXDEV))

    monkeypatch.setattr(moving, "_renamed_exclusively", refuse)
    assert main(["convert", str(source), str(out), "--force", "--discard"]) == 1
    assert "in a lower layer of an image can't be renamed: copy it (cp -r)" in capsys.readouterr().err


def test_no_content_is_replaced_where_the_system_can_only_rename(monkeypatch, tmp_path):
    """What comes between the look and the renaming."""
    monkeypatch.setattr(moving, "_renamed_exclusively", lambda source, target: False)
    monkeypatch.setattr(os.path, "lexists", lambda path: False)
    (tmp_path / "new").mkdir()
    thesis(tmp_path / "out")
    with pytest.raises(FileExistsError):
        rename_new(tmp_path / "new", tmp_path / "out")
    assert contents(tmp_path / "out") == {"thesis.txt": b"precious"}


def test_two_processes_finish_in_the_same_moment(source, tmp_path):
    """Of two finished conversions one gets the name, and the other stays whole."""
    for attempt in range(20):
        place, out = tmp_path / f"{attempt}", tmp_path / f"{attempt}" / "out"
        works = [place / "first", place / "second"]
        place.mkdir()
        for work in works:
            shutil.copytree(source, work)
            (work / "who").write_text(work.name)
        expected = contents(works[0]).keys()
        start, go = os.pipe()
        children = []
        for work in works:
            if not (child := os.fork()):
                os.close(go)
                os.read(start, 1)  # ends for both when the parent lets go
                try:
                    rename_new(work, out)
                except FileExistsError:
                    os._exit(1)
                os._exit(0)
            children.append(child)
        os.close(go)
        os.close(start)
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        assert sorted(codes) == [0, 1]
        assert (out / "who").read_text() == works[codes.index(0)].name
        assert contents(out).keys() == contents(works[codes.index(1)]).keys() == expected


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
            put = convert._put_in_place

            def wait(plan, work):
                os.write(stop, b".")
                os.read(waiting, 1)
                return put(plan, work)

            convert._put_in_place = wait
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
    assert sorted(os.listdir(tmp_path)) == ["base", "out"]
    if not force:
        with pytest.raises(ConversionError, match="already exists"):
            converted(source, out, hc_mult=3)


def test_a_lock_on_what_has_its_name_meanwhile_is_none(tmp_path, monkeypatch):
    """Between opening a folder and holding it, the conversion in it may end."""
    work = tmp_path / "work"
    work.mkdir()
    opened = os.open

    def late(path, *arguments, **options):
        descriptor = opened(path, *arguments, **options)
        work.rename(tmp_path / "out")
        return descriptor

    monkeypatch.setattr(moving.os, "open", late)
    with pytest.raises(FileNotFoundError):
        moving.held(work)


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


@pytest.mark.parametrize("present", [True, False])
def test_what_has_the_name_for_the_old_one_stays(present, source, tmp_path):
    out, previous = tmp_path / "out", tmp_path / ".out.previous"
    if present:
        converted(source, out, hc_mult=2)
    thesis(previous)
    if present:
        with pytest.raises(ConversionError, match=r"\.out\.previous' is in the way"):
            converted(source, out, force=True)
        assert streams(out) == 2
    else:
        converted(source, out, force=True)
    assert contents(previous) == {"thesis.txt": b"precious"}


def test_what_was_being_replaced_is_kept_without_force(source, out, tmp_path):
    """As when the machine went down between the two renamings."""
    out.rename(tmp_path / ".out.previous")
    lines = []
    convert_checkpoint(str(source), out, verify="structure", say=lines.append)
    assert streams(tmp_path / ".out.previous") == 2
    assert any(".out.previous' is still there" in line for line in lines)
    converted(source, out, force=True)
    assert sorted(os.listdir(tmp_path)) == ["base", "out"]


def test_place_names():
    place = Place(Path("/models/out"))
    assert (place.work, place.previous) == (Path("/models/.out.incomplete"), Path("/models/.out.previous"))
