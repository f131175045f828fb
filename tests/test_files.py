"""Files appear whole or not at all, and only in the folder that they are meant for."""

from pathlib import Path

import pytest

from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.files import writing as files
from hf_hyperconn.conversion.files.writing import is_part, leads_out, replace_file, replace_files


def test_a_file_is_replaced(tmp_path):
    for content in (b"one", b"another"):
        replace_file(tmp_path / "file", content)
        assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", content)]


def test_a_link_is_not_followed(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "mine").write_bytes(b"mine")
    (tmp_path / "folder" / "file").symlink_to(tmp_path / "mine")
    replace_file(tmp_path / "folder" / "file", b"new")
    assert (tmp_path / "mine").read_bytes() == b"mine"
    (file,) = (tmp_path / "folder").iterdir()
    assert (file.name, file.is_symlink(), file.read_bytes()) == ("file", False, b"new")


def test_what_is_not_complete_takes_no_name_of_a_user_s_or_another_process_s(tmp_path, monkeypatch):
    (tmp_path / ".file.part").write_bytes(b"mine")
    parts, replace = [], Path.replace

    def note(self, target):
        parts.append(self.name)
        if len(parts) == 1:  # another process comes to the same file
            replace_file(tmp_path / "file", b"theirs")
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", note)
    replace_file(tmp_path / "file", b"ours")
    assert len({*parts}) == 2
    assert all(map(is_part, parts))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {".file.part": b"mine", "file": b"ours"}


def test_a_name_that_is_taken_keeps_its_file(tmp_path, monkeypatch):
    monkeypatch.setattr("secrets.token_hex", lambda size: "0" * 2 * size)
    taken = tmp_path / ".hyperconn-0000000000000000.part"
    taken.symlink_to(tmp_path / "nothing")
    with pytest.raises(FileExistsError):
        replace_file(tmp_path / "file", b"new")
    assert [*tmp_path.iterdir()] == [taken]


def test_what_a_killed_process_left_does_not_last(llama_folder, tmp_path):
    part, work = ".hyperconn-0123456789abcdef.part", tmp_path / ".out.incomplete"
    work.mkdir()
    (work / part).write_bytes(b"{")
    out = convert_checkpoint(str(llama_folder), tmp_path / "out", verify="structure").path
    assert not (out / part).exists()


def test_of_several_files_none_changes_when_one_can_not_be_written(tmp_path, monkeypatch):
    (tmp_path / "a").write_bytes(b"old")
    (tmp_path / "gone").write_bytes(b"old")
    token_hex, count = files.secrets.token_hex, iter(range(9))

    def full(size):
        if next(count) == 2:
            raise OSError(28, "No space left on device")
        return token_hex(size)

    changes = {"gone": None, "a": b"new", "b": b"new", "c": b"new"}
    with monkeypatch.context() as patch:
        patch.setattr("secrets.token_hex", full)
        with pytest.raises(OSError, match="No space left"):
            replace_files(tmp_path, changes)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"a": b"old", "gone": b"old"}
    replace_files(tmp_path, changes)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == dict.fromkeys("abc", b"new")


def test_a_failure_leaves_what_was_there(tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(b"old")

    def refuse(self, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="No space left"):
        replace_file(tmp_path / "file", b"new")
    assert [(path.name, path.read_bytes()) for path in tmp_path.iterdir()] == [("file", b"old")]


def test_what_leads_out(tmp_path):
    folder = tmp_path / "models--org--name" / "snapshots" / "0123"
    blobs = tmp_path / "models--org--name" / "blobs"
    for place in (folder, blobs, folder.parent / "other"):
        place.mkdir(parents=True)
    for path in (folder / "here", blobs / "blob", folder.parent / "other" / "there", tmp_path / "secret"):
        path.write_text("")
    links = {
        "inside": "here",
        "cached": "../../blobs/blob",
        "beside": "../other/there",
        "outside": tmp_path / "secret",
        "nowhere": tmp_path / "nothing",
        "through": "../../blobs/../../secret",
    }
    for name, target in links.items():
        (folder / name).symlink_to(target)
    assert not leads_out(folder, folder / "here")
    assert {name for name in links if leads_out(folder, folder / name)} == {"beside", "outside", "nowhere", "through"}
    (tmp_path / "plain").mkdir()
    (tmp_path / "blobs").mkdir()
    (tmp_path / "blobs" / "blob").write_text("")
    (tmp_path / "plain" / "link").symlink_to(tmp_path / "blobs" / "blob")
    assert leads_out(tmp_path / "plain", tmp_path / "plain" / "link"), "no cache of the Hub"
