"""What comes along with the weights: nothing from outside the folder, nothing by halves, nothing for more to read."""

import json
import os
import stat
from pathlib import Path

import pytest

from hf_hyperconn.conversion import convert
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.files.writing import opened_to_copy, replace_file
from hf_hyperconn.errors import ConversionError, UnsupportedCheckpointError

CUSTOM = {"auto_map": {"AutoTokenizer": ["evil/repo--tok.T", None]}}
READ_BY_TRANSFORMERS = (
    "tokenizer",
    "processor",
    "preprocessor",
    "video_preprocessor",
    "generation",
    "image_processor",
)


@pytest.fixture
def secret(tmp_path) -> Path:
    path = tmp_path / "id_rsa"
    path.write_text("secret")
    return path


def converted(source: Path, out: Path, **options) -> Path:
    return convert_checkpoint(str(source), out, **{"verify": "structure", **options}).path


@pytest.mark.parametrize(
    "name", ["notes.txt", "config.json", "README.md", "templates/a.jinja", "generation_config.json"]
)
def test_a_link_out_of_the_base(name, source, secret, tmp_path, capsys):
    if (source / name).exists():
        secret.write_bytes((source / name).read_bytes())
        (source / name).unlink()
    (source / name).parent.mkdir(exist_ok=True)
    (source / name).symlink_to(secret)
    assert main(["convert", str(source), str(tmp_path / "out")]) == 1
    message = f"'{source / name}' is a link to '{secret}', outside the folder. Put a file in its place, or remove it."
    assert message in capsys.readouterr().err
    assert sorted(os.listdir(tmp_path)) == ["base", "id_rsa"]


def test_an_index_that_leads_out(source, tmp_path):
    (source / "model.safetensors").rename(source / "a.safetensors")
    (tmp_path / "index").write_text('{"weight_map": {"x": "a.safetensors"}}')
    (source / "model.safetensors.index.json").symlink_to(tmp_path / "index")
    with pytest.raises(UnsupportedCheckpointError, match="index.json' is a link to '.*', outside the folder"):
        converted(source, tmp_path / "out")


def test_links_inside_the_base_and_of_weights(source, tmp_path):
    (source / "LICENSE").write_text("terms")
    (source / "COPYING").symlink_to("LICENSE")
    (source / "model.safetensors").rename(tmp_path / "weights")
    (source / "model.safetensors").symlink_to(tmp_path / "weights")
    (tmp_path / "by name").symlink_to(source)
    out = converted(tmp_path / "by name", tmp_path / "out", verify="full")
    assert (out / "COPYING").read_text() == "terms"
    assert not (out / "COPYING").is_symlink()
    assert (out / "model-00001-of-00002.safetensors").read_bytes() == (tmp_path / "weights").read_bytes()


def test_folders_by_links_and_special_files_stay_behind(source, secret, tmp_path):
    (tmp_path / "private").mkdir()
    secret.rename(tmp_path / "private" / "key")
    (source / "templates").symlink_to(tmp_path / "private")
    (source / "null").symlink_to("/dev/null")
    os.mkfifo(source / "pipe")
    out = converted(source, tmp_path / "out")
    assert not {"templates", "null", "pipe"} & {path.name for path in out.iterdir()}


@pytest.mark.parametrize("swap", ["link", "pipe"])
def test_what_takes_the_place_of_a_file_after_the_plan(swap, source, secret, monkeypatch, tmp_path):
    (source / "notes.txt").write_text("notes")

    def then(plan, work):
        (source / "notes.txt").unlink()
        (source / "notes.txt").symlink_to(secret) if swap == "link" else os.mkfifo(source / "notes.txt")
        return write(plan, work)

    write = convert._write_companions
    monkeypatch.setattr(convert, "_write_companions", then)
    errors = (ConversionError, UnsupportedCheckpointError)
    with pytest.raises(errors, match="outside the folder|is not a regular file"):
        converted(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not any(path.name == "notes.txt" for path in (tmp_path / ".out.incomplete").iterdir())


def test_what_is_no_file_is_not_opened(secret, tmp_path):
    (tmp_path / "link").symlink_to(secret)
    os.mkfifo(tmp_path / "pipe")
    for name in ("link", "pipe"):
        with pytest.raises(OSError, match="is not a regular file"), opened_to_copy(tmp_path / name, tmp_path / "copy"):
            pass
    assert not (tmp_path / "copy").exists()


def test_the_plan_takes_no_file_s_name(source, tmp_path):
    (source / "plan.json").write_text("a plan of mine")
    assert (converted(source, tmp_path / "out") / "plan.json").read_text() == "a plan of mine"


def test_what_stays_behind(source, tmp_path):
    left = ["PYTORCH_MODEL.BIN", "optimizer.pkl", "scaler.joblib", "x.pickle", "last/checkpoint-5/rng_state.json"]
    left += ["last/trainer_state.json", "logs/events.out.tfevents.1"]
    for name in left:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text("")
    out = converted(source, tmp_path / "out")
    assert not [name for name in left if (out / name).exists()]


@pytest.mark.parametrize("part", READ_BY_TRANSFORMERS)
def test_parts_with_code_of_their_own(part, source, tmp_path):
    (source / f"{part}_config.json").write_text(json.dumps(CUSTOM))
    (source / "tok.py").write_text("")
    message = rf"{part}_config.json of .* names code of its own \(auto_map: .*evil/repo--tok.T"
    with pytest.raises(UnsupportedCheckpointError, match=message):
        converted(source, tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["base"]


def test_parts_within_parts_and_folders(source, tmp_path):
    (source / "processor_config.json").write_text(json.dumps({"parts": [{"image_processor": CUSTOM}]}))
    with pytest.raises(UnsupportedCheckpointError, match="processor_config.json of .* names code"):
        converted(source, tmp_path / "out")
    (source / "processor_config.json").unlink()
    (source / "tokenizer").mkdir()
    (source / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(CUSTOM))
    with pytest.raises(UnsupportedCheckpointError, match="tokenizer/tokenizer_config.json of .* names code"):
        converted(source, tmp_path / "out")


def test_generation_by_code(source, tmp_path):
    (source / "custom_generate").mkdir()
    (source / "custom_generate" / "generate.py").write_text("")
    with pytest.raises(UnsupportedCheckpointError, match="generates by code of its own"):
        converted(source, tmp_path / "out")


def test_parts_without_code(source, tmp_path):
    tokenizer = {"tokenizer_class": "PreTrainedTokenizerFast", "auto_map": {}, "extra": [1, {"a": None}]}
    (source / "tokenizer_config.json").write_text(json.dumps(tokenizer))
    assert json.loads((converted(source, tmp_path / "out") / "tokenizer_config.json").read_text()) == tokenizer


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.fixture
def umask():
    before = os.umask(0o022)
    yield os.umask
    os.umask(before)


def test_what_is_private_stays_so(source, umask, tmp_path):
    modes = {
        "model.safetensors": 0o600,
        "LICENSE": 0o640,
        "vocab.txt": 0o666,
        "notes": 0o400,
        "templates/a.jinja": 0o644,
    }
    (source / "templates").mkdir(mode=0o750)
    for name, wanted in modes.items():
        (source / name).touch()
        (source / name).chmod(wanted)
    source.chmod(0o700)
    out = converted(source, tmp_path / "out")
    (shard,) = out.glob("*-00001-of-*")
    assert mode(shard) == 0o600
    assert [mode(out / name) for name in list(modes)[1:]] == [0o640, 0o644, 0o600, 0o644]
    assert (mode(out), mode(out / "templates")) == (0o700, 0o750)


def test_what_is_made_of_a_private_config_is_private(source, umask, tmp_path):
    source.chmod(0o755)
    (source / "config.json").chmod(0o640)
    assert mode(converted(source, tmp_path / "out")) == 0o750


def test_what_is_open_is_as_open_as_the_umask_lets_it(source, umask, tmp_path):
    for path in (source, *source.iterdir()):
        path.chmod(0o777)
    umask(0o027)
    out = converted(source, tmp_path / "out")
    assert mode(out) == 0o750
    assert {mode(path) for path in out.iterdir()} == {0o640}


def test_a_file_that_is_replaced_keeps_its_permissions(umask, tmp_path):
    path = tmp_path / "file"
    replace_file(path, b"one")
    assert mode(path) == 0o644
    for wanted in (0o600, 0o664):
        path.chmod(wanted)
        replace_file(path, b"two")
        assert (mode(path), path.read_bytes()) == (wanted, b"two")
