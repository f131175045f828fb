"""A saved or converted folder in a process that cannot import hf_hyperconn."""

import json
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from hf_hyperconn import convert_model
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.families.family import find_family

from . import other_families
from .conftest import hc_llama
from .families import FAMILIES
from .isolated import printed
from .marks import few
from .tiny import tiny

LOAD = """
import json, os, sys
from pathlib import Path
import torch, transformers
transformers.logging.set_verbosity_error()
folder, again, autos, ids = sys.argv[1], sys.argv[2], *map(json.loads, sys.argv[3:])
report = {}
for auto in autos:
    model = getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()
    with torch.no_grad():
        output = model(torch.tensor(ids))[0].tolist()
    report[auto] = [type(model).__module__.partition(".")[0], type(model).__name__, output]
for path in Path(os.environ["HF_MODULES_CACHE"]).rglob("*.py"):
    path.write_text("what was not run is not saved")
model.save_pretrained(again)
print(json.dumps(report))
"""


@pytest.fixture
def elsewhere(tmp_path):
    """Load a folder by some Auto classes, save the last model again, and return class and output of each."""

    def run(folder, again, autos, ids, **variables: str) -> dict:
        arguments = folder, again, json.dumps(autos), json.dumps(ids.tolist())
        modules = tmp_path / f"modules {again.name}"
        return json.loads(printed(LOAD, *arguments, place=tmp_path, modules=modules, **variables))

    return run


def test_every_auto_class_loads_saves_and_loads_again(llama, llama_folder, ids, tmp_path, elsewhere):
    converted = convert_checkpoint(str(llama_folder), tmp_path / "converted", verify="structure").path
    with torch.no_grad():
        expected = llama(ids).logits
    autos = [auto for auto in FAMILIES["llama"].auto_map if auto not in ("AutoConfig", "AutoModelForCausalLM")]
    first = elsewhere(converted, tmp_path / "again", [*autos, "AutoModelForCausalLM"], ids)
    second = elsewhere(tmp_path / "again", tmp_path / "third", ["AutoModelForCausalLM"], ids)
    for auto, (origin, name, _) in first.items():
        assert origin == "transformers_modules"
        assert FAMILIES["llama"].auto_map[auto].endswith(f".{name}")
    for report in (first, second):
        assert torch.equal(torch.tensor(report["AutoModelForCausalLM"][2]), expected)
    configs = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("converted", "again", "third")]
    assert configs[0]["auto_map"] == configs[1]["auto_map"] == configs[2]["auto_map"]
    for name in FAMILIES["llama"].code(configs[0]):
        assert (tmp_path / "third" / name).read_bytes() == (converted / name).read_bytes()


OUTPUTS = """
import json, sys
import torch, transformers
from pathlib import Path
transformers.logging.set_verbosity_error()

def load(auto, folder):
    return getattr(transformers, auto).from_pretrained(folder, trust_remote_code=True).eval()

def output(model):
    for parameter in model.parameters():  # where they lie in a file decides how a product on CPU is rounded
        parameter.data = parameter.data.clone()
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        return model(ids, **{"decoder_input_ids": ids} if model.config.is_encoder_decoder else {})[0].tolist()
"""
SAVE_PARTS = f"""{OUTPUTS}
folder, again, *autos = sys.argv[1:]
outputs = {{}}
for auto in autos:
    model = load(auto, folder)
    parts = [model.base_model] if model.config.is_encoder_decoder else [model.base_model, model.get_decoder()]
    parts = {{**dict.fromkeys(parts, "AutoModel"), model: auto}}
    for part, of_part in parts.items():
        path = f"{{again}}/{{auto}}/{{type(part).__name__}}/{{of_part}}"
        part.save_pretrained(path)
        outputs[path] = output(part)
        assert output(load(of_part, path)) == outputs[path]
print(json.dumps(outputs))
"""
LOAD_PARTS = f"""{OUTPUTS}
print(json.dumps({{path: output(load(Path(path).name, path)) for path in sys.argv[1:]}}))
"""


@pytest.mark.parametrize("model_type", few(["llava", "llama", "t5"], "llava"))
def test_whatever_is_saved_of_a_model_loads(model_type, tmp_path):
    """The model of each Auto class, its base model and its language model, in the same process and in another."""
    convert_model(other_families.tiny(model_type), hc_mult=2).save_pretrained(tmp_path / "hc")
    autos = [auto for auto in find_family(model_type).auto_map if auto != "AutoConfig"]
    heads_first = sorted(autos, key="AutoModel".__eq__)
    saved = printed(SAVE_PARTS, tmp_path / "hc", tmp_path / "again", *heads_first, place=tmp_path)
    paths = json.loads(saved)
    again = printed(LOAD_PARTS, *paths, place=tmp_path, modules=tmp_path / "other modules")
    assert json.loads(again) == paths
    assert len(paths) > len(autos)


@pytest.mark.slow
def test_a_part_that_no_auto_class_has_is_saved_with_its_code(tmp_path):
    convert_model(other_families.tiny("t5"), hc_mult=2).save_pretrained(tmp_path / "hc")
    save = f"{OUTPUTS}\nload('AutoModelForSeq2SeqLM', sys.argv[1]).encoder.save_pretrained(sys.argv[2])"
    printed(save, tmp_path / "hc", tmp_path / "again", place=tmp_path)
    assert {path.name for path in (tmp_path / "again").glob("*.py")} == {*find_family("t5").code({})}


@pytest.mark.slow
def test_a_config_that_is_saved_alone_loads(tmp_path):
    """With the code of its models, too, where one was made."""
    convert_model(other_families.tiny("llama"), hc_mult=2).save_pretrained(tmp_path / "hc")
    config = "transformers.AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)"
    printed(f"{OUTPUTS}\n{config}.save_pretrained(sys.argv[2])", tmp_path / "hc", tmp_path / "alone", place=tmp_path)
    save = f"{OUTPUTS}\nload('AutoModel', sys.argv[1]).config.save_pretrained(sys.argv[2])"
    printed(save, tmp_path / "hc", tmp_path / "of a model", place=tmp_path)
    for name in ("alone", "of a model"):
        printed(f"{OUTPUTS}\n{config}", tmp_path / name, place=tmp_path)
    assert {path.name for path in (tmp_path / "of a model").glob("*.py")} == {*find_family("llama").code({})}


NAMED = """
import sys
import torch, transformers
transformers.logging.set_verbosity_error()
ids = torch.arange(3, 7)[None]
models = [
    transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval() for folder in sys.argv[1:]
]
assert len({type(model) for model in models}) == len(models)
for model in models:
    model(ids, labels=ids).loss.backward()
    assert torch.equal(model(ids).logits, models[0](ids).logits)
"""


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("connection", ["dhc", "mhc"])
def test_a_folder_may_have_any_name(connection, tmp_path):
    """Side by side in one process, where each brings operators of its own."""
    model = hc_llama(num_hidden_layers=1, connection=connection, hc_mult=2)
    folders = [tmp_path / name for name in ("my model+v2", "my_model_v2", "my-model.v2", "7b@2", "modèle'漢")]
    for folder in folders:
        model.save_pretrained(folder)
    printed(NAMED, *folders, place=tmp_path, HF_HYPERCONN_IMPLEMENTATION="triton", TRITON_INTERPRET="1")


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton")
@pytest.mark.parametrize("connection", ["dhc", "mhc"])
def test_a_folder_brings_the_fused_kernels(connection, llama, llama_folder, ids, tmp_path, elsewhere):
    """And takes them when the environment asks for them: here in Triton's interpreter, in float32."""
    out = convert_checkpoint(str(llama_folder), tmp_path / "converted", hc_mult=2, connection=connection).path
    kernels = {"HF_HYPERCONN_IMPLEMENTATION": "triton", "TRITON_INTERPRET": "1"}
    report = elsewhere(out, tmp_path / "again", ["AutoModelForCausalLM"], ids[:1, :4], **kernels)
    with torch.no_grad():
        expected = llama(ids[:1, :4]).logits
    *_, logits = report["AutoModelForCausalLM"]
    assert torch.equal(torch.tensor(logits), expected)
    refused = {"HF_HYPERCONN_IMPLEMENTATION": "triton", "TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": ""}
    with pytest.raises(AssertionError, match="the streams are on cpu, not on a GPU"):
        elsewhere(out, tmp_path / "refused", ["AutoModelForCausalLM"], ids[:1, :4], **refused)


@pytest.mark.parametrize("model_type", few(["llama", "gemma"], "llama"))
def test_embeddings_that_are_stored_as_what_reads_out(model_type, ids, tmp_path, elsewhere):
    """They are tied, which the config of a Llama says, and that of a Gemma leaves to its class."""
    config = tiny(model_type).config
    torch.manual_seed(0)
    tied = AutoModelForCausalLM.from_config(type(config).from_dict({**config.to_dict(), "tie_word_embeddings": True}))
    tied.eval().save_pretrained(tmp_path / "base")
    if model_type == "gemma":
        path = tmp_path / "base" / "config.json"
        written = json.loads(path.read_text())
        written.pop("tie_word_embeddings", None)
        path.write_text(json.dumps(written))
    tensors = load_file(tmp_path / "base" / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "base" / "model.safetensors", metadata={"format": "pt"})

    converted = convert_checkpoint(str(tmp_path / "base"), tmp_path / "converted").path
    with torch.no_grad():
        expected = tied(ids).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path / "base").eval()(ids).logits, expected)
        model, info = AutoModelForCausalLM.from_pretrained(converted, output_loading_info=True)
        assert not info["missing_keys"]
        assert torch.equal(model.eval()(ids).logits, expected)
    report = elsewhere(converted, tmp_path / "again", ["AutoModelForCausalLM"], ids)
    assert torch.equal(torch.tensor(report["AutoModelForCausalLM"][2]), expected)
