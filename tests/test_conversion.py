"""The converter on local checkpoints of every shape."""

import hashlib
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaModel,
)

from hf_hyperconn import HCLlamaForCausalLM
from hf_hyperconn.conversion import convert
from hf_hyperconn.conversion.checkpoint.source import LocalSource
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.files import writing
from hf_hyperconn.conversion.planning.plan import plan_conversion
from hf_hyperconn.errors import ConversionError, VerificationError
from hf_hyperconn.kinds import FIELDS

from .conftest import llama_config
from .families import FAMILIES
from .marks import few
from .test_golden_folders import contents


def saved(folder: Path, model_class=LlamaForCausalLM, *, shard: str = "50GB", dtype=torch.float32, **config) -> Path:
    torch.manual_seed(0)
    model_class(llama_config(initializer_range=0.2, **config)).to(dtype).save_pretrained(folder, max_shard_size=shard)
    return folder


def shard_names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.glob("*.safetensors"))


@pytest.mark.parametrize("dtype", few((torch.float32, torch.bfloat16, torch.float16), torch.bfloat16))
@pytest.mark.parametrize("shard", ["50GB", "20KB"])
@pytest.mark.parametrize("tied", [True, False])
def test_inputs(dtype, shard, tied, tmp_path, ids):
    source = saved(tmp_path / "base", shard=shard, dtype=dtype, tie_word_embeddings=tied)
    before = contents(source)
    result = convert_checkpoint(str(source), tmp_path / "out", hc_mult=4)
    assert result.verification.passed
    assert {c.dtype for c in result.verification.comparisons} == {str(dtype).removeprefix("torch."), "float32"}
    assert contents(source) == before

    count = len(shard_names(source))
    assert (count > 1) == (shard == "20KB")
    assert shard_names(result.path) == [f"model-{i:05}-of-{count + 1:05}.safetensors" for i in range(1, count + 2)]
    for name, target in result.plan.shards.items():
        assert (result.path / target).read_bytes() == (source / name).read_bytes()
    index = json.loads((result.path / "model.safetensors.index.json").read_text())
    stored = {}
    for name in shard_names(result.path):
        with safe_open(result.path / name, "pt") as file:
            stored.update({key: (name, file.get_tensor(key)) for key in file.keys()})  # noqa: SIM118
    assert index["weight_map"] == {key: name for key, (name, _) in stored.items()}
    assert index["metadata"]["total_parameters"] == sum(tensor.numel() for _, tensor in stored.values())
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for _, tensor in stored.values())

    loaded = AutoModelForCausalLM.from_pretrained(result.path, dtype="auto")
    assert type(loaded) is HCLlamaForCausalLM
    base = LlamaForCausalLM.from_pretrained(source, dtype="auto")
    assert base.dtype == loaded.dtype == dtype
    assert torch.equal(loaded(ids).logits, base(ids).logits)


@pytest.mark.parametrize(
    ("base_class", "auto"),
    [
        (LlamaModel, AutoModel),
        (LlamaForSequenceClassification, AutoModelForSequenceClassification),
        (LlamaForQuestionAnswering, AutoModelForQuestionAnswering),
    ],
)
def test_other_heads(base_class, auto, tmp_path, ids):
    source = saved(tmp_path / "base", base_class)
    result = convert_checkpoint(str(source), tmp_path / "out", hc_mult=2)
    assert result.verification.passed
    with torch.no_grad():
        assert torch.equal(auto.from_pretrained(result.path)(ids)[0], base_class.from_pretrained(source)(ids)[0])


def test_from_prenorm_takes_a_config_by_its_name_as_from_pretrained_does(llama_folder):
    model = HCLlamaForCausalLM.from_prenorm(llama_folder, config=str(llama_folder), num_hidden_layers=2)
    assert len(model.model.layers) == 2


def test_converted_equals_from_prenorm(llama_folder, tmp_path):
    """Two ways to one model: every parameter, by name, shape, dtype and value."""
    for connection in ("shc", "dhc"):
        out = tmp_path / connection
        convert_checkpoint(str(llama_folder), out, connection=connection, verify="structure")
        expected = HCLlamaForCausalLM.from_prenorm(llama_folder, connection=connection).state_dict()
        model, info = HCLlamaForCausalLM.from_pretrained(out, output_loading_info=True)
        assert not any(info.values())
        found = model.state_dict()
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            assert found[name].dtype == value.dtype
            assert torch.equal(found[name], value), name
        loaded = json.loads((out / "config.json").read_text())
        model.save_pretrained(tmp_path / f"{connection} again")
        again = json.loads((tmp_path / f"{connection} again" / "config.json").read_text())
        assert {**again, "transformers_version": loaded["transformers_version"]} == loaded


def test_planned_parameters_are_those_added(llama_folder, llama, tmp_path):
    for connection in ("shc", "dhc"):
        plan = plan_conversion(str(llama_folder), tmp_path / "out", fields={"hc_mult": 5, "connection": connection})
        model = HCLlamaForCausalLM.from_prenorm(llama_folder, hc_mult=5, connection=connection)
        assert plan.hc_parameters == model.num_parameters() - llama.num_parameters()


def test_everything_useful_comes_along(llama_folder, tmp_path):
    source = shutil.copytree(llama_folder, tmp_path / "base")
    kept = ["tokenizer.json", "chat_template.jinja", "LICENSE.txt", "USE_POLICY.md", "templates/tool.jinja"]
    left = [".gitattributes", "pytorch_model.bin", "consolidated.safetensors", "original/params.json"]
    left += ["tiny-llama-HCx2/config.json", "tiny-llama-HCx2/tokenizer.json"]
    left += ["modeling_llama.py", "model.gguf", "onnx/model.onnx", "optimizer.pt", ".cache/huggingface/x.lock"]
    for name in [*kept, *left, "README.md"]:
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(f"content of {name}")
    out = convert_checkpoint(str(source), tmp_path / "out", verify="structure").path
    for name in kept:
        assert (out / name).read_text() == f"content of {name}"
    assert (out / "generation_config.json").read_bytes() == (source / "generation_config.json").read_bytes()
    for name in left:
        assert not (out / name).exists(), name
    assert "content of README.md" not in (out / "README.md").read_text()
    config = json.loads((out / "config.json").read_text())
    assert {path.name: path.read_text() for path in out.glob("*.py")} == FAMILIES["llama"].code(config)


def test_record(llama_folder, tmp_path):
    out = convert_checkpoint(str(llama_folder), tmp_path / "out", hc_mult=2, connection="shc").path
    record = json.loads((out / "hyperconn_conversion.json").read_text())
    assert record["base"] == {"model": llama_folder.name, "commit": None}  # not where it lies
    assert record["arguments"] == {**FIELDS, "hc_mult": 2, "connection": "shc", "link": "copy"}
    assert record["versions"].keys() == {"hf_hyperconn", "safetensors", "torch", "transformers"}
    added = (out / record["hyper_connection_shard"]).read_bytes()
    assert record["hyper_connection_sha256"] == hashlib.sha256(added).hexdigest()
    (shard,) = record["base_shards"]
    content = (llama_folder / "model.safetensors").read_bytes()
    assert (shard["size"], shard["sha256"]) == (len(content), hashlib.sha256(content).hexdigest())
    assert record["verification"]["passed"] is True
    assert record["verification"]["comparisons"][0]["max_difference"] == 0.0


@pytest.mark.parametrize("link", ["hard", "symlink"])
def test_links(link, llama_folder, tmp_path):
    source = shutil.copytree(llama_folder, tmp_path / "base")
    before = contents(source)
    out = convert_checkpoint(str(source), tmp_path / "out", link=link).path
    shard, base = out / "model-00001-of-00002.safetensors", source / "model.safetensors"
    assert shard.samefile(base)
    assert shard.is_symlink() == (link == "symlink")
    model = HCLlamaForCausalLM.from_pretrained(out)
    with torch.no_grad():
        model.lm_head.weight.zero_()
    model.save_pretrained(out)
    assert contents(source) == before, "saving over a linked conversion changed the base"


def test_converts_into_the_checkpoint_s_own_folder(llama_folder, tmp_path, monkeypatch):
    source = shutil.copytree(llama_folder, tmp_path / "base")
    monkeypatch.chdir(source)
    for times in (1, 2):
        out = convert_checkpoint(".", verify="structure", force=True).path
        assert out == Path("base-HCx4")
        assert len([path for path in source.iterdir() if path.is_dir()]) == times
        assert not any(path.is_dir() for path in out.iterdir())


def test_links_across_file_systems_say_what_to_do(llama_folder, tmp_path, monkeypatch):
    def refuse(*arguments, **keywords):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "link", refuse)
    with pytest.raises(ConversionError, match="cross-device link. Use --link copy"):
        convert_checkpoint(str(llama_folder), tmp_path / "out", link="hard")
    assert not (tmp_path / "out").exists()


def test_a_cache_snapshot_is_read_through_its_links(llama_folder, tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    shutil.copytree(llama_folder, blobs)
    snapshot.mkdir(parents=True)
    for path in blobs.iterdir():
        (snapshot / path.name).symlink_to(path)
    out = convert_checkpoint(str(snapshot), tmp_path / "out", link="hard", verify="structure").path
    assert not any(path.is_symlink() for path in out.iterdir())
    assert (out / "model-00001-of-00002.safetensors").samefile(blobs / "model.safetensors")


def test_resumes_without_copying_again(tmp_path, monkeypatch):
    source = saved(tmp_path / "base", shard="20KB")
    copied = []
    copy = writing._copy
    monkeypatch.setattr(writing, "_copy", lambda a, b, *progress: copied.append(a.name) or copy(a, b, *progress))

    def fail(plan, work):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(convert, "_write_companions", fail)
        with pytest.raises(ConversionError, match="No space left on device. Fix that and run the same command again"):
            convert_checkpoint(str(source), tmp_path / "out")
    assert sorted(copied) == shard_names(source)
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.incomplete").is_dir()
    copied.clear()
    convert_checkpoint(str(source), tmp_path / "out", verify="structure")
    assert not {*copied} & {*shard_names(source)}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["base", "out"]


def test_an_attempt_with_other_arguments_starts_over(llama_folder, tmp_path):
    work = tmp_path / ".out.incomplete"
    work.mkdir()
    (work / convert.PLAN).write_text('{"plan": "something else"}')
    (work / "model-00001-of-00002.safetensors").write_bytes(b"of another model")
    (work / "leftover").write_text("")
    out = convert_checkpoint(str(llama_folder), tmp_path / "out", verify="structure").path
    assert not (out / "leftover").exists()
    assert not (out / convert.PLAN).exists()


def test_a_shard_of_an_earlier_attempt_is_not_trusted(llama_folder, tmp_path):
    plan = plan_conversion(str(llama_folder), tmp_path / "out")
    work = tmp_path / ".out.incomplete"
    work.mkdir()
    (work / convert.PLAN).write_text(json.dumps({"plan": plan.fingerprint()}))
    base = (llama_folder / "model.safetensors").read_bytes()
    (work / "model-00001-of-00002.safetensors").write_bytes(base[:-1] + b"!")
    out = convert_checkpoint(str(llama_folder), tmp_path / "out", verify="structure").path
    assert (out / "model-00001-of-00002.safetensors").read_bytes() == base


def test_copies_where_the_kernel_can_not(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError(18, "Invalid cross-device link")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    monkeypatch.setattr(writing, "CHUNK", 1000)
    source = saved(tmp_path / "base")
    out = convert_checkpoint(str(source), tmp_path / "out").path
    assert (out / "model-00001-of-00002.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()


def test_a_copy_that_differs_is_found(llama_folder, tmp_path, monkeypatch):
    def spoil(source, target, link, progress):
        target.write_bytes(source.read_bytes()[:-1] + b"!")

    monkeypatch.setattr(convert, "copy_or_link", spoil)
    with pytest.raises(VerificationError, match="differs from"):
        convert_checkpoint(str(llama_folder), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_tensors_the_model_does_not_know_pass_through(tmp_path):
    """Old Llama checkpoints store rotary frequencies."""
    source = saved(tmp_path / "base")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    result = convert_checkpoint(str(source), tmp_path / "out")
    assert result.verification.passed


def test_what_is_still_to_download_needs_space_too(llama_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(LocalSource, "to_download", lambda self, names: (tmp_path, 10**18))
    with pytest.raises(ConversionError, match="needs 1000000000.00 GB in"):
        plan_conversion(str(llama_folder), tmp_path / "out")


@pytest.mark.parametrize(
    "fields", [{"hc_mult": 0}, {"hc_mult": -1}, {"connection": "xhc"}, {"link": "soft"}, {"verify": "no"}]
)
def test_fields_that_are_not_accepted(fields, llama_folder, tmp_path):
    with pytest.raises(ConversionError, match=r"asked for|must be .* \(got"):
        convert_checkpoint(str(llama_folder), tmp_path / "out", **fields)


def test_where_the_base_lies_is_not_published(llama_folder, tmp_path):
    """Older releases of Transformers wrote into a config where they had loaded it from."""
    base = shutil.copytree(llama_folder, tmp_path / "me" / "llama")
    config = json.loads((base / "config.json").read_text())
    (base / "config.json").write_text(json.dumps({**config, "_name_or_path": "/home/me/llama"}))
    (base / "inside").mkdir()
    out = convert_checkpoint(str(base / "inside" / ".."), tmp_path / "out", verify="structure").path
    assert json.loads((out / "hyperconn_conversion.json").read_text())["base"]["model"] == "llama"
    for file in out.iterdir():
        assert b"/me/" not in file.read_bytes(), file
