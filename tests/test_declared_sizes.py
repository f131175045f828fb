"""A config.json is checked against the headers of its weights, and Transformers' loading reports must name nothing."""

import json
import re
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_hyperconn.conversion.checkpoint import loading
from hf_hyperconn.conversion.checkpoint.checkpoint import Checkpoint, open_conversion
from hf_hyperconn.conversion.checkpoint.checkpoint_files import INDEX, read_raw_config
from hf_hyperconn.conversion.checkpoint.source import LocalSource
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.verify import verify_checkpoint
from hf_hyperconn.conversion.verify.numeric import compare_models
from hf_hyperconn.errors import UnsupportedCheckpointError, VerificationError
from hf_hyperconn.families.family import Family

from .edits import configure, edit_tensors
from .families import FAMILIES
from .marks import few
from .tiny import tiny


@pytest.fixture(scope="module")
def pristine(llama_folder, tmp_path_factory) -> Path:
    return convert_checkpoint(str(llama_folder), tmp_path_factory.mktemp("sizes") / "out", verify="structure").path


@pytest.fixture
def out(pristine, tmp_path) -> Path:
    return shutil.copytree(pristine, tmp_path / "out")


def edit(folder: Path, change, file: str = "model.safetensors") -> Path:
    edit_tensors(folder / file, change)
    return folder


def refused(source: Path, verify: str) -> str:
    with pytest.raises(UnsupportedCheckpointError) as refusal:
        convert_checkpoint(str(source), source.parent / "out", verify=verify)
    assert not list(source.parent.glob("*out*")), "work was done first"
    return str(refusal.value)


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"num_hidden_layers": 4}, "num_hidden_layers is 4, and there is no layer 3"),
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2, and there are 3"),
        ({"num_hidden_layers": 10**6}, "num_hidden_layers is 1000000, and there is no layer 3"),
        ({"hidden_size": 64}, r"hidden_size is 64, and model.embed_tokens.weight is [96, 32]"),
        ({"hidden_size": 10**8}, "hidden_size is 100000000, and model.embed_tokens.weight is"),
        ({"vocab_size": 95}, "vocab_size is 95, and model.embed_tokens.weight is [96, 32]"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
    ],
)
def test_sizes_that_the_weights_have_not(changes, fault, source):
    """Whatever is verified: nothing heavy is needed to see them."""
    tracemalloc.start()
    assert fault in refused(configure(source, **changes), "off")
    assert tracemalloc.get_traced_memory()[1] < 2**24
    tracemalloc.stop()


@pytest.mark.parametrize("stored", [{"tie_word_embeddings": False}, {}])
def test_what_reads_out_is_no_embedding_of_a_model_that_is_not_tied(stored, source):
    configure(source, tie_word_embeddings=None)
    edit(configure(source, **stored), lambda tensors: tensors.pop("model.embed_tokens.weight"))
    assert "the tensor model.embed_tokens.weight is missing" in refused(source, "off")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.embed_tokens.weight"])
def test_a_missing_tensor_outside_of_the_layers(name, source):
    assert f"the tensor {name} is missing" in refused(edit(source, lambda tensors: tensors.pop(name)), "off")


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"intermediate_size": 10**9}, "mlp.down_proj.weight is [32, 48], and its model's [32, 1000000000]"),
        ({"num_attention_heads": 8, "head_dim": 8}, "and its model's [32, 64]"),
        ({"attention_bias": True}, "the tensor model.layers.0.self_attn.k_proj.bias is missing"),
        ({"architectures": ["LlamaForTokenClassification"]}, "the tensor score.bias is missing"),
        ({"num_attention_heads": "four"}, "Transformers can't load it ("),
        ({"pad_token_id": 1000}, "Transformers can't load it ("),
    ],
)
def test_other_sizes_are_compared_by_transformers_before_any_work(changes, fault, source):
    assert fault in refused(configure(source, **changes), "structure")


def test_what_a_config_makes_is_in_proportion_to_the_weights(source, capsys):
    """Or its frequencies alone would take all memory."""
    rope = {"rope_theta": 1e4, "rope_type": "linear", "factor": 1.0, "partial_rotary_factor": 1e6}
    configure(source, rope_parameters=rope)
    assert main(["convert", str(source), "-n", "2", "--verify", "structure"]) == 1
    assert re.search(r"the config makes \S*inv_freq of [\d,]+ values, and the weights have", capsys.readouterr().err)


def test_weights_of_another_family(tmp_path):
    tiny("qwen3").save_pretrained(tmp_path / "base")
    configure(tmp_path / "base", model_type="llama", architectures=["LlamaForCausalLM"])
    message = refused(tmp_path / "base", "structure")
    assert "a LlamaForCausalLM has no tensor model.layers.0.self_attn.k_norm.weight" in message


def test_a_class_that_casts_its_modules_while_it_is_made(tmp_path, monkeypatch):
    """Which fake tensors can't follow."""
    made = LlamaMLP.__init__

    def cast(self, config):
        made(self, config)
        self.to(torch.float32)

    tiny("llama").save_pretrained(tmp_path)
    monkeypatch.setattr(LlamaMLP, "__init__", cast)
    assert loading.fault_by_headers(opened(tmp_path, FAMILIES["llama"])) is None


@pytest.mark.parametrize("model_type", few(FAMILIES, "llama", "olmoe", "qwen3", "gemma2"))
def test_headers_of_every_family_and_head_fit(model_type, tmp_path):
    family = FAMILIES[model_type]
    for head in family.heads:
        tiny(model_type, head).save_pretrained(tmp_path / head)
        base = opened(tmp_path / head, family)
        assert loading.fault_by_headers(base) is None, head
        name = next(name for name in base.weights.tensors if name.endswith("o_proj.weight"))
        del base.weights.tensors[name]
        fault = loading.fault_by_headers(base)
        assert fault == loading.LoadingFault("missing", f"the tensor {name} is missing"), head


def opened(folder: Path, family: Family) -> Checkpoint:
    """A base."""
    source = LocalSource(folder)
    return Checkpoint(source, read_raw_config(source), family)


def change_weights(folder: Path, change) -> None:
    """Change the base's tensors in a conversion, and its index."""
    path, index = folder / "model-00001-of-00002.safetensors", json.loads((folder / INDEX).read_text())
    edit_tensors(path, change)
    others = {name: file for name, file in index["weight_map"].items() if file != path.name}
    (folder / INDEX).write_text(
        json.dumps({**index, "weight_map": {**others, **dict.fromkeys(load_file(path), path.name)}})
    )


@pytest.mark.parametrize("mode", ["structure", "full"])
@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (lambda tensors: tensors.pop("model.norm.weight"), "the tensor model.norm.weight is missing"),
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"), "up_proj.weight is missing"),
        (
            lambda tensors: tensors.update({"model.layers.0.self_attn.q_norm.weight": torch.ones(8)}),
            "a LlamaForCausalLM has no tensor model.layers.0.self_attn.q_norm.weight",
        ),
    ],
    ids=["norm", "layer", "another"],
)
def test_a_conversion_equal_to_a_base_with_the_same_fault_fails(change, fault, mode, out, source):
    """Both models would initialise what is missing alike, and leave out what they don't know."""
    change_weights(out, change)
    edit(source, change)
    assert fault in verify_checkpoint(out, str(source), mode=mode).failure


def test_the_reports_of_both_models_that_run_are_read(out, source):
    edit(source, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(VerificationError, match=r"base' as Transformers loads it is not complete: the tensor lm_head"):
        compare_models(open_conversion(out), opened(source, FAMILIES["llama"]), layers=3)


def test_an_architecture_of_another_family(out):
    configure(out, architectures=["HCQwen3ForCausalLM"])
    with pytest.raises(UnsupportedCheckpointError, match="names the architecture 'HCQwen3ForCausalLM'; known"):
        verify_checkpoint(out)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_base_of_what_is_no_number_is_named(value, source, capsys):
    edit(source, lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"][0].fill_(value))
    assert main(["convert", str(source), str(source.parent / "out")]) == 3
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"model.layers.1.mlp.up_proj.weight of '{source}' holds NaN or infinity, so there is nothing to" in message


@pytest.mark.parametrize(("longest", "continues"), [(1, None), (5, True), (16, True), (17, True)])
def test_few_positions(longest, continues, source):
    configure(source, max_position_embeddings=longest)
    result = convert_checkpoint(str(source), source.parent / "out", verify="full")
    (comparison,) = result.verification.comparisons
    assert (comparison.equal, comparison.continuation) == (True, continues)


@pytest.mark.slow
def test_an_expert_of_another_shape_is_refused_in_one_line(tmp_path):
    """torch logs the trace of what fails while experts are fused, though that is caught."""
    tiny("olmoe").save_pretrained(tmp_path / "base")
    name = "model.layers.0.mlp.experts.1.gate_proj.weight"
    edit(tmp_path / "base", lambda tensors: tensors.update({name: tensors[name][:-1].clone()}))
    command = [sys.executable, "-m", "hf_hyperconn.conversion", "convert", "base", "out", "-q"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert ended.returncode == 1
    assert "fake_tensor" not in ended.stderr
    assert "Traceback" not in ended.stderr
    assert "do not fit its config.json" in ended.stderr.splitlines()[-1]


def test_a_conversion_of_what_is_no_number_is_named(source, capsys):
    """As training that has diverged leaves it."""
    out = source.parent / "out"
    assert main(["convert", str(source), str(out), "-q", "--verify", "off"]) == 0
    name = "model.layers.1.mlp_hc.static_beta"
    edit(out, lambda tensors: tensors[name].fill_(float("nan")), "model-00002-of-00002.safetensors")
    capsys.readouterr()
    assert main(["verify", str(out), "--against", str(source), "--mode", "full"]) == 3
    message = capsys.readouterr().err.splitlines()[-1]
    assert f"{name} of '{out}' holds NaN or infinity, so there is nothing to" in message
