"""The modules of sentence-transformers come along and are published, nothing from elsewhere; what stays is named."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from hf_hyperconn.conversion.checkpoint.checkpoint import open_conversion
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.push.folder import CheckedFolder
from hf_hyperconn.conversion.verify import verify_checkpoint
from hf_hyperconn.errors import UnsupportedCheckpointError

ST = "sentence_transformers.models"
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": f"{ST}.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": f"{ST}.Pooling"},
    {"idx": 2, "name": "2", "path": "./2_Dense/", "type": f"{ST}.Dense"},
    {"idx": 3, "name": "3", "path": "3_Normalize", "type": f"{ST}.Normalize"},
]
NAMED = {
    *("modules.json", "config_sentence_transformers.json", "sentence_bert_config.json"),
    *("1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"),
}


def write(folder: Path, name: str, content="{}") -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))


@pytest.fixture
def source(llama_folder, tmp_path) -> Path:
    """A base with modules, another model in a folder and what training left."""
    folder = shutil.copytree(llama_folder, tmp_path / "base")
    for name in NAMED | {"other/config.json", "2_Dense/optimizer.pt", "1_Pooling/.netrc", "1_Pooling/secrets.txt"}:
        write(folder, name)
    write(folder, "modules.json", MODULES)
    save_file({"linear.weight": torch.ones(2, 32)}, folder / "2_Dense" / "model.safetensors")
    save_file({"linear.weight": torch.ones(2, 32)}, folder / "other" / "model.safetensors")
    return folder


def inside(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


def test_modules_come_along_whole(source, tmp_path):
    said = []
    out = convert_checkpoint(str(source), tmp_path / "out", verify="structure", say=said.append).path
    assert inside(out) >= NAMED
    assert (out / "2_Dense/model.safetensors").read_bytes() == (source / "2_Dense/model.safetensors").read_bytes()
    assert not inside(out) & {"other/config.json", "other/model.safetensors", "2_Dense/optimizer.pt"}
    assert "left behind   2_Dense/optimizer.pt, other/config.json, other/model.safetensors" in said
    assert verify_checkpoint(out).passed


def test_a_push_takes_modules_and_nothing_private(source, tmp_path):
    out = convert_checkpoint(str(source), tmp_path / "out", verify="structure").path
    write(out, "2_Dense/optimizer.pt")
    checked = CheckedFolder(open_conversion(out), (), trained=False)
    assert checked.names >= NAMED
    assert {"2_Dense/optimizer.pt", "1_Pooling/secrets.txt"} <= set(checked.left)


def test_shards_of_a_module_are_named_and_no_pickle_beside_safetensors(source, tmp_path):
    write(source, "2_Dense/pytorch_model.bin")
    write(source, "2_Dense/model.safetensors.index.json")
    lines = []
    convert_checkpoint(str(source), tmp_path / "out", verify="structure", say=lines.append)
    (line,) = (line for line in lines if "modules.json" in line)
    assert "names the folder of 2_Dense/model.safetensors.index.json, which is not copied" in line


def test_weights_of_modules_in_pickles_are_named(source, tmp_path, capsys):
    (source / "2_Dense" / "model.safetensors").unlink()
    (source / "2_Dense" / "optimizer.pt").unlink()
    write(source, "2_Dense/pytorch_model.bin")
    assert main(["convert", str(source), str(tmp_path / "out"), "--verify", "structure"]) == 0
    printed = capsys.readouterr().err
    assert "warning       modules.json names the folder of 2_Dense/pytorch_model.bin, which is not copied: " in printed
    assert "save it as safetensors, and convert that." in printed
    assert not (tmp_path / "out" / "2_Dense" / "pytorch_model.bin").exists()


@pytest.mark.parametrize("path", ["../outside", "/etc", "a/../../outside", "..", "1_Pooling/../../outside"])
def test_no_module_lies_outside(path, source, tmp_path):
    write(tmp_path, "outside/config.json")
    write(source, "modules.json", [{"path": path, "type": f"{ST}.Pooling"}])
    with pytest.raises(UnsupportedCheckpointError, match="modules.json of .* names '.*', a path outside"):
        convert_checkpoint(str(source), tmp_path / "out")
    assert sorted(os.listdir(tmp_path)) == ["base", "outside"]


def test_a_module_that_is_a_link_out(source, tmp_path):
    write(tmp_path, "secret.safetensors", "secret")
    (source / "2_Dense" / "model.safetensors").unlink()
    (source / "2_Dense" / "model.safetensors").symlink_to(tmp_path / "secret.safetensors")
    with pytest.raises(UnsupportedCheckpointError, match="2_Dense/model.safetensors' is a link to .*, outside"):
        convert_checkpoint(str(source), tmp_path / "out")


@pytest.mark.parametrize("content", [{}, "a", [{"path": "1_Pooling"}], [{"path": 1, "type": "a.B"}], [None], None])
def test_what_is_no_list_of_modules(content, source, tmp_path):
    write(source, "modules.json", json.dumps(content))
    with pytest.raises(UnsupportedCheckpointError, match="is no list of modules with path and type. Download"):
        convert_checkpoint(str(source), tmp_path / "out")


@pytest.mark.parametrize("name", ["custom_st.Transformer", "owner/repo--custom_st.Transformer", "code.st.Pooling"])
def test_modules_with_code_of_their_own(name, source, tmp_path):
    write(source, "custom_st.py", "")
    write(source, "code/st.py", "")
    write(source, "modules.json", [{"path": "", "type": name}])
    with pytest.raises(UnsupportedCheckpointError, match=rf"modules.json of .* names code of its own \({name}\)"):
        convert_checkpoint(str(source), tmp_path / "out")


def test_a_plan_lists_all_that_stays(llama_folder, tmp_path, capsys):
    source = shutil.copytree(llama_folder, tmp_path / "base")
    left = ["model.gguf", "optimizer.pt", "pytorch_model.bin", "runs/events", "trainer_state.json"]
    for name in (*left, ".gitattributes", "README.md", "LICENSE"):
        write(source, name)
    assert main(["convert", str(source), str(tmp_path / "out"), "--dry-run", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["left"] == left
    assert main(["convert", str(source), str(tmp_path / "out"), "--dry-run"]) == 0
    assert f"  left behind    {' '.join(left)}\n" in capsys.readouterr().out
    assert main(["convert", str(source), str(tmp_path / "out"), "--verify", "structure"]) == 0
    some = "left behind   model.gguf, optimizer.pt, pytorch_model.bin and 2 more (--dry-run lists all)\n"
    assert some in capsys.readouterr().err
