"""`convert --force` and OUT by other names: what is replaced, what is refused, and what stays."""

import json
import os
import shutil
from pathlib import Path

import pytest

from hf_hyperconn import HCLlamaForCausalLM
from hf_hyperconn.conversion import place
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.plan import plan_conversion
from hf_hyperconn.errors import ConversionError

from .marks import few

ADDED, BROUGHT = "model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def converted(source: Path | str, out: Path | str, **options) -> Path:
    return convert_checkpoint(str(source), out, **{"verify": "structure", **options}).path


@pytest.fixture
def source(llama_folder, tmp_path) -> Path:
    return shutil.copytree(llama_folder, tmp_path / "base")


@pytest.fixture(scope="module")
def made(llama_folder, tmp_path_factory) -> Path:
    """A folder with a base and its conversion."""
    place = tmp_path_factory.mktemp("made")
    source = shutil.copytree(llama_folder, place / "base")
    (source / "templates").mkdir()
    (source / "templates" / "tool.jinja").write_text("{{ tool }}")
    converted(source, place / "out", verify="full")
    return place


@pytest.fixture
def out(made, source, tmp_path) -> Path:
    shutil.copytree(made / "base", source, dirs_exist_ok=True)
    return shutil.copytree(made / "out", tmp_path / "out", symlinks=True)


def edit_record(out: Path, **changes):
    record = json.loads((out / "hyperconn_conversion.json").read_text())
    kept = {name: value for name, value in {**record, **changes}.items() if value is not None}
    (out / "hyperconn_conversion.json").write_text(json.dumps(kept))


def flip(path: Path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("link", ["copy", "hard", "symlink"])
@pytest.mark.parametrize("verify", ["full", "structure"])
def test_a_conversion_is_replaced(link, verify, source, tmp_path):
    for _ in range(2):
        converted(source, tmp_path / "out", link=link, verify=verify, force=True)
    assert sorted(os.listdir(tmp_path)) == ["base", "out"]


OTHERS = {
    "a file": (lambda out: (out / "notes.txt").write_text("mine"), "notes.txt"),
    "a hidden file": (lambda out: (out / ".env").write_text("mine"), ".env"),
    "a nested file": (lambda out: (out / "templates" / "mine").write_text("mine"), "templates/mine"),
    "a link": (lambda out: (out / "link").symlink_to("/nowhere"), "link"),
    "a link to a folder": (lambda out: (out / "data").symlink_to(out.parent), "data"),
    "a pipe": (lambda out: os.mkfifo(out / "pipe"), "pipe"),
    "a base weight": (lambda out: flip(out / BROUGHT), BROUGHT),
    "trained connections": (lambda out: flip(out / ADDED), ADDED),
    "code": (lambda out: (out / "modeling_hc_llama.py").open("a").write("\n"), "modeling_hc_llama.py"),
    "a card": (lambda out: (out / "README.md").open("a").write("My words."), "README.md"),
    "a card again": (lambda out: main(["card", str(rename(out)), "-q"]), "README.md"),
    "a record without files": (lambda out: edit_record(out, files=None), "config.json"),
    "a record without the card": (lambda out: edit_record(out, card=None), "README.md"),
    "a record without the connections": (lambda out: edit_record(out, hyper_connection_sha256=None), ADDED),
}


def rename(out: Path) -> Path:
    """The conversion, whose card will tell another number of something."""
    edit_record(out, versions={"hf_hyperconn": "0.0.1"})
    return out


@pytest.mark.parametrize("change", few(OTHERS, *list(OTHERS)[::3]))
def test_what_no_conversion_made_is_not_removed(change, source, out):
    make, name = OTHERS[change]
    make(out)
    before = sorted(out.rglob("*"))
    with pytest.raises(
        ConversionError, match="contains files that the conversion did not write or that have changed since: "
    ) as error:
        converted(source, out, force=True)
    assert f" {name}" in str(error.value)
    assert "--discard" in str(error.value)
    assert sorted(out.rglob("*")) == before
    assert (converted(source, out, force=True, discard=True) / "templates" / "tool.jinja").is_file()
    assert not any(path.name.startswith(".out") for path in out.parent.iterdir())
    assert converted(source, out, force=True) == out


@pytest.mark.parametrize("link", ["copy", "hard", "symlink"])
def test_weights_without_a_digest_may_have_changed(link, source, tmp_path):
    """Without verification a local base is not read. A link's weights are the base's, and stay there."""
    out = converted(source, tmp_path / "out", link=link, verify="off")
    if link == "copy":
        flip(out / BROUGHT)
    before = contents(out)
    if link != "symlink":
        with pytest.raises(ConversionError, match=f"base weights that may have changed, .* of them: {BROUGHT}. Save"):
            converted(source, out, force=True)
        assert contents(out) == before
        plan = plan_conversion(str(source), out, force=True, discard=True)
        assert plan.as_dict()["discards"] == [BROUGHT]
        assert f"also what may have changed: {BROUGHT}" in plan.describe()
    converted(source, out, force=True, discard=link != "symlink")
    assert converted(source, out, force=True) == out


def test_what_verify_off_left_aside_stays_where_nothing_replaces_it(source, tmp_path):
    out = converted(source, tmp_path / "out", verify="off")
    flip(out / BROUGHT)
    previous = out.rename(tmp_path / ".out.previous")
    before = contents(previous)
    converted(source, tmp_path / "out", force=True)
    assert contents(previous) == before


def test_a_trained_model_is_not_removed(source, out, capsys):
    model = HCLlamaForCausalLM.from_pretrained(out)
    model.save_pretrained(out)
    before = contents(out)
    assert main(["convert", str(source), str(out), "--force"]) == 1
    assert "config.json, model.safetensors. Save what you need" in capsys.readouterr().err
    assert contents(out) == before


def test_many_files_are_counted(source, out):
    for number in range(5):
        (out / f"a{number}").touch()
    with pytest.raises(ConversionError, match="a0, a1, a2 and 2 more. Save what you need"):
        converted(source, out, force=True)
    plan = plan_conversion(str(source), out, force=True, discard=True)
    assert plan.as_dict()["discards"] == [f"a{number}" for number in range(5)]
    assert "also what no conversion made: a0, a1, a2 and 2 more" in plan.describe()
    assert "a4" in contents(out)


def test_the_comparison_that_verify_notes_is_no_change(source, tmp_path):
    out = converted(source, tmp_path / "out", verify="off")
    assert main(["verify", str(out), "--against", str(source), "-q"]) == 0
    converted(source, out, force=True)


@pytest.mark.parametrize("record", ["{}", "[", "[1]"])
def test_a_folder_whose_record_is_not_ours(record, source, out):
    (out / "hyperconn_conversion.json").write_text(record)
    before = contents(out)
    with pytest.raises(ConversionError, match="is not a converted checkpoint"):
        converted(source, out, force=True, discard=True)
    assert contents(out) == before


def test_discard_goes_with_force(source, tmp_path, capsys):
    assert main(["convert", str(source), str(tmp_path / "out"), "--discard"]) == 1
    assert "Give both, or neither." in capsys.readouterr().err


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
        converted(given, out, force=force, discard=force, link="symlink")
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
    monkeypatch.setattr(place, "mount_in", lambda folder: folder)
    with pytest.raises(ConversionError, match="is a mount point, and can't be replaced"):
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
        assert json.loads((target / "config.json").read_text())["hc_mult"] == n
        assert os.listdir(tmp_path / "disk") == ["model"]
    assert sorted(os.listdir(tmp_path)) == ["base", "disk", "out"]
    with pytest.raises(ConversionError, match="already exists"):
        converted(source, link)


def test_out_is_a_link_that_leads_nowhere(source, tmp_path):
    (tmp_path / "out").symlink_to(tmp_path / "nothing" / "model")
    with pytest.raises(ConversionError, match="there is no folder '.*nothing' to write 'model' in. Create it first."):
        converted(source, tmp_path / "out")
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(ConversionError, match="is a link that leads to itself"):
        converted(source, tmp_path / "loop", force=True)


def test_a_name_that_is_too_long(source, tmp_path):
    for length in (245, 300):
        with pytest.raises(
            ConversionError, match="is too long: the conversion works in a folder of .* Choose another OUT."
        ):
            converted(source, tmp_path / ("n" * length))


@pytest.mark.parametrize("verify", ["structure", "auto"])
def test_weights_that_somebody_changed_are_not_lost(verify, source, tmp_path):
    """Also where their size and time are as they were."""
    out = converted(source, tmp_path / "out", verify=verify)
    weights = out / BROUGHT
    status = weights.stat()
    flip(weights)
    os.utime(weights, ns=(status.st_atime_ns, status.st_mtime_ns))
    changed = weights.read_bytes()
    with pytest.raises(ConversionError, match="--discard"):
        converted(source, out, force=True)
    assert weights.read_bytes() == changed
    converted(source, out, force=True, discard=True)
