"""What the command line refuses: one line that says what to do, the exit code, and nothing written."""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.planning import plan

from .edits import configure


@pytest.fixture
def refusal(tmp_path, capsys):
    """Run `convert` on a model, require the refusal and return its message."""

    def run(model, *options: str, out: str = "out") -> str:
        before = sorted(tmp_path.rglob("*"))
        assert main(["convert", str(model), str(tmp_path / out), *options]) == 1
        assert sorted(tmp_path.rglob("*")) == before, "something was written"
        printed = capsys.readouterr()
        assert printed.out == ""
        (line,) = printed.err.splitlines()
        assert line.startswith("error: ")
        assert "unexpected" not in line
        return line

    return run


def test_other_model_type(source, refusal):
    message = refusal(configure(source, model_type="albert"))
    assert "can't be converted: AlbertModel has no list of layers whose classes" in message
    assert "docs/families.md lists the model types" in message
    message = refusal(configure(source, model_type="unheard-of"))
    assert "has no model type 'unheard-of'" in message


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"model_type": None}, "has model_type None"),
        ({"model_type": "minimax"}, "can't be converted: minimax scales the residual stream itself"),
        ({"model_type": "bert"}, "can't be converted: bert norms the residual stream itself"),
        (
            {"model_type": "gpt_neox", "architectures": None, "use_parallel_residual": False},
            "has use_parallel_residual False; hf-hyperconn knows the layers of gpt_neox with",
        ),
        (
            {"model_type": "hc_llama", "hc_mult": 4},
            "is already a hyper-connection model (n=4). Convert its base instead.",
        ),
        (
            {"quantization_config": {"quant_method": "awq"}},
            "is quantized (quant_method=awq); convert the full-precision checkpoint",
        ),
        (
            {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}},
            "brings code of its own (auto_map), which is not run",
        ),
        (
            {"architectures": ["LlamaForVision"]},
            "is a LlamaForVision; hf-hyperconn converts: LlamaModel, LlamaForCausalLM",
        ),
        ({"hidden_size": None}, "has no hidden_size"),
    ],
)
def test_other_configs(changes, reason, source, refusal):
    assert reason in refusal(configure(source, **changes))


def test_pickle_only(source, refusal):
    (source / "model.safetensors").rename(source / "pytorch_model.bin")
    assert "no safetensors weights, only pytorch_model.bin, and pickles are not read" in refusal(source)


def test_no_weights(source, refusal):
    (source / "model.safetensors").unlink()
    assert "has no weights: neither model.safetensors nor" in refusal(source)


def test_models_of_diffusers(source, refusal):
    (source / "config.json").write_text('{"_class_name": "DiTTransformer2DModel", "_diffusers_version": "0.42.1"}')
    assert "is a model or a pipeline of diffusers, not of Transformers. Load it with diffusers" in refusal(source)
    (source / "config.json").rename(source / "model_index.json")
    assert "is a model or a pipeline of diffusers" in refusal(source)


def test_adapter(source, refusal):
    (source / "model.safetensors").rename(source / "adapter_model.safetensors")
    (source / "adapter_config.json").write_text("{}")
    assert "is an adapter (adapter_config.json), not a model. Merge it" in refusal(source)
    (source / "config.json").unlink()
    assert "is an adapter" in refusal(source)


def test_no_config(source, refusal):
    (source / "config.json").unlink()
    assert "has no config.json" in refusal(source)


@pytest.mark.parametrize("content", ["not json", "[1]", "\udcff"])
def test_broken_config(content, source, refusal):
    (source / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    assert "is not" in refusal(source)


def shard(source: Path, *names: str) -> None:
    """Spread the checkpoint over shards with these names."""
    tensors = list(load_file(source / "model.safetensors").items())
    (source / "model.safetensors").unlink()
    weight_map = {}
    for i, name in enumerate(names):
        part = dict(tensors[i :: len(names)])
        weight_map.update(dict.fromkeys(part, name))
        save_file(part, source / Path(name).name, metadata={"format": "pt"})
    (source / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_missing_shard(source, refusal):
    shard(source, "a.safetensors", "b.safetensors")
    (source / "b.safetensors").unlink()
    assert "index.json of" in (message := refusal(source))
    assert "names b.safetensors, which is missing. Copy or download the checkpoint again." in message


@pytest.mark.parametrize("keep", [0, 4, 100, 2000, -1])
def test_corrupt_shard(keep, source, refusal):
    content = (source / "model.safetensors").read_bytes()
    (source / "model.safetensors").write_bytes(content[:keep] or b"<html>404 Not Found</html>" * 10)
    assert "is cut short or not a safetensors file" in refusal(source)


def test_shard_without_its_tensor(source, refusal):
    shard(source, "a.safetensors", "b.safetensors")
    shutil.copy(source / "a.safetensors", source / "b.safetensors")
    assert "in b.safetensors, which does not hold it" in refusal(source)


@pytest.mark.parametrize("name", ["../secret.safetensors", "/etc/secret.safetensors", "sub/../../secret.safetensors"])
def test_index_that_names_a_path_outside(name, source, refusal):
    shard(source, name)
    (source / "secret.safetensors").rename(source.parent / "secret.safetensors")
    assert "which is not a file beside it. Do not trust this checkpoint." in refusal(source)


@pytest.mark.parametrize("index", ["{}", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}', "not json"])
def test_broken_index(index, source, refusal):
    (source / "model.safetensors").unlink()
    (source / "model.safetensors.index.json").write_text(index)
    assert "Download it again." in refusal(source)


def test_no_layers(source, refusal):
    save_file({"x": load_file(source / "model.safetensors")["model.norm.weight"]}, source / "model.safetensors")
    assert "hold no decoder layer 0" in refusal(source)


def test_out_exists(source, refusal, tmp_path):
    (tmp_path / "out").mkdir()
    assert "already exists. Choose another OUT, or rename the old one by --force." in refusal(source)
    (tmp_path / "file").write_text("")
    assert "already exists" in refusal(source, out="file")


def test_no_such_parent(source, refusal):
    assert "there is no folder" in refusal(source, out="nowhere/out")


def test_no_space(source, refusal, monkeypatch):
    usage = shutil.disk_usage(source)
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda path: usage._replace(free=1_000_000))
    message = refusal(source)
    assert "1 MB free. Free some space, or use --link hard." in message


@pytest.fixture
def refusal_to_a_stranger(source, tmp_path):
    """As `refusal`, in a child that is not the owner of anything (and not root, which no permission stops)."""
    for path in [tmp_path, *tmp_path.parents, *tmp_path.rglob("*")]:
        if any("pytest-of-" in part for part in path.parts):
            path.chmod(path.stat().st_mode | (0o555 if path.is_dir() else 0o444))

    def run(folder: Path, command: str = "convert", *arguments: str) -> str:
        log = tmp_path / "log"
        child = os.fork()
        if child == 0:
            code = 99
            try:
                with log.open("w") as sys.stderr:
                    if os.geteuid() == 0:
                        os.setuid(65534)
                    bases = [str(source)] * (command == "convert")
                    code = main([command, *bases, str(folder), *arguments])
            finally:
                os._exit(code)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 1, log.read_text()
        return log.read_text()

    return run


def test_no_permission_to_write(refusal_to_a_stranger, tmp_path):
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o555)
    expected = f"error: no permission to write in '{locked}'. Choose another OUT.\n"
    assert refusal_to_a_stranger(locked / "out") == expected


def test_no_permission_to_read(refusal_to_a_stranger, source, tmp_path):
    (source / "model.safetensors").chmod(0)
    message = refusal_to_a_stranger(tmp_path / "out")
    assert message.endswith("model.safetensors': Permission denied. Check its permissions.\n")


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"_attn_implementation": "some/kernel@main"}, "_attn_implementation 'some/kernel@main'"),
        ({"attn_implementation": {"": "eager", "text_config": "some/kernel"}}, "attn_implementation 'some/kernel'"),
        ({"text_config": {"_attn_implementation": "paged|some/kernel"}}, "_attn_implementation 'paged|some/kernel'"),
        ({"experts_implementation": "some/kernel:function"}, "experts_implementation 'some/kernel:function'"),
    ],
)
def test_kernels_of_the_hub(changes, named, source, refusal):
    message = refusal(configure(source, **changes))
    assert f"config.json of {str(source)!r} has {named}, which is code on the Hub that would run" in message
    assert message.endswith("Remove that from config.json, or convert a checkpoint without it.")


def test_an_earlier_conversion_that_can_not_be_entered(refusal_to_a_stranger, tmp_path):
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    (locked := tmp_path / "open" / ".out.incomplete").mkdir(mode=0)
    message = refusal_to_a_stranger(tmp_path / "open" / "out")
    assert message.startswith(
        f"error: can't see how much space is needed for '{tmp_path / 'open' / 'out'}': '{locked}"
    )
    assert message.endswith("Permission denied. Allow that, remove it, or choose another OUT.\n")


@pytest.mark.parametrize("command", ["card", "plot", "push"])
def test_a_folder_that_can_not_be_entered(command, refusal_to_a_stranger, source, tmp_path):
    (locked := tmp_path / "locked").mkdir(mode=0)
    message = refusal_to_a_stranger(locked, command, *["me/model"] * (command == "push"))
    assert message == f"error: can't read '{locked}': Permission denied. Allow that, or give another folder.\n"


def test_no_such_folder(refusal):
    assert "there is no folder './nowhere', nor can it be a Hub id (owner/name). Check the path." in refusal(
        "./nowhere"
    )


def test_a_file(source, refusal):
    assert "is a file; give the folder of a checkpoint" in refusal(source / "model.safetensors")
    (source / "model.gguf").touch()
    assert "Load it with Transformers (gguf_file=...)" in refusal(source / "model.gguf")


def test_revision_of_a_folder(source, refusal):
    assert "has no revision 'main'; drop --revision" in refusal(source, "--revision", "main")


@pytest.mark.parametrize("n", ["0", "-3"])
def test_no_streams(n, source, refusal):
    assert f"--hc-mult must be a whole number, at least 1 (got {n})." in refusal(source, "-n", n)
