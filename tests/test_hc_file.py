"""Hyper-connections trained alone, and the small file that holds them."""

import json
import os
import subprocess
import sys
from copy import deepcopy

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor, Replicate, distribute_tensor, init_device_mesh
from transformers import (
    AutoModelForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    LlamaConfig,
    MistralConfig,
    MistralForCausalLM,
)

from hf_hyperconn import (
    HCLlamaConfig,
    HCLlamaForCausalLM,
    HCLlamaForSequenceClassification,
    HCLlamaModel,
    convert_model,
    freeze_base,
    hc_parameters,
    load_hc,
    save_hc,
)
from hf_hyperconn.errors import HyperConnectionFileError
from hf_hyperconn.training import hc_file

from . import other_families
from .conftest import TINY, hc_llama, llama_config, train

LLAMA_1B = LlamaConfig(  # of meta-llama/Llama-3.2-1B
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    tie_word_embeddings=True,
)


def change(model) -> None:
    """As training would: every hyper-connection parameter becomes another."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in hc_parameters(model).values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))


def equal(model, other, ids) -> bool:
    with torch.no_grad():
        return torch.equal(model(ids).logits, other(ids).logits)


def unchanged(model, before: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.fixture
def trained(llama):
    """The tiny Llama with hyper-connections that have moved from where they start."""
    model = convert_model(llama)
    change(model)
    return model


def test_the_parameters_are_those_a_conversion_adds(llama):
    converted = convert_model(llama, hc_readout="learned")
    names = dict(converted.named_parameters())
    added = hc_parameters(converted)
    assert added.keys() == names.keys() - dict(llama.named_parameters()).keys()
    assert all(added[name] is names[name] for name in added)
    assert any("hc_head" in name for name in added)


def test_only_hyper_connections_train_and_the_file_brings_them_to_the_base(stories, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(stories)
    converted = convert_model(model)
    freeze_base(converted)
    before = deepcopy(model.state_dict())
    ids = torch.randint(3, 500, (4, 32), generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(hc_parameters(converted).values(), lr=1e-2, weight_decay=0.0)
    losses = train(converted, optimizer, [ids] * 5)
    assert losses[-1] < losses[0]
    assert unchanged(model, before)
    assert not equal(converted, model, ids)

    file = save_hc(converted, tmp_path)
    assert file == tmp_path / "hyper_connections.safetensors"
    assert os.listdir(tmp_path) == [file.name]
    onto_base = load_hc(AutoModelForCausalLM.from_pretrained(stories), file)
    assert equal(onto_base, converted, ids)
    onto_conversion = HCLlamaForCausalLM.from_prenorm(stories)
    assert load_hc(onto_conversion, tmp_path) is onto_conversion
    assert equal(onto_conversion, converted, ids)


def test_a_base_stays_as_it_is(llama, trained, ids, tmp_path):
    before = deepcopy(llama.state_dict())
    loaded = load_hc(llama, save_hc(trained, tmp_path))
    assert unchanged(llama, before)
    assert not equal(loaded, llama, ids)
    assert loaded.model.embed_tokens.weight is llama.model.embed_tokens.weight


@pytest.mark.parametrize(
    "fields",
    [
        {"connection": "shc", "hc_mult": 2},
        {"connection": "mhc", "hc_sinkhorn_iters": 3, "hc_eps": 1e-5, "hc_readout": "learned"},
        {"connection": "frac", "hc_tanh": False},
    ],
    ids=lambda fields: fields["connection"],
)
def test_fields_come_with_the_file(fields, llama, ids, tmp_path):
    model = HCLlamaForCausalLM(HCLlamaConfig.from_prenorm(llama.config, **fields)).eval()
    model.load_state_dict(llama.state_dict(), strict=False)
    change(model)
    loaded = load_hc(llama, save_hc(model, tmp_path))
    assert {name: getattr(loaded.config, name) for name in fields} == fields
    assert equal(loaded, model, ids)


def test_heads_and_wrappers_share_a_file(llama, trained, ids, tmp_path):
    file = save_hc(torch.compile(trained), tmp_path / "of a compiled model.safetensors")
    assert load_file(file).keys() == hc_parameters(trained).keys()
    classifier = HCLlamaForSequenceClassification(trained.config)
    backbone = HCLlamaModel(trained.config)
    for model in (classifier, backbone, torch.nn.DataParallel(convert_model(llama))):
        load_hc(model, file)
        for value, expected in zip(hc_parameters(model).values(), hc_parameters(trained).values(), strict=True):
            assert torch.equal(value, expected)
    assert load_file(save_hc(backbone, tmp_path)).keys() == hc_parameters(backbone).keys()
    assert equal(load_hc(llama, tmp_path), trained, ids)


def test_classes_made_in_memory_can_be_saved_so(ids, tmp_path):
    torch.manual_seed(0)
    base = Glm4ForCausalLM(Glm4Config(**TINY, head_dim=8)).eval()
    model = convert_model(base)
    change(model)
    assert equal(load_hc(base, save_hc(model, tmp_path)), model, ids)


def test_the_file_is_under_one_percent_of_a_model_of_1b(tmp_path):
    """Not so of the tiny ones here, whose hidden size is 64: the share falls with it."""
    with torch.device("meta"):
        model = HCLlamaForCausalLM(HCLlamaConfig.from_prenorm(LLAMA_1B))
    base_bytes = 2 * sum(parameter.numel() for parameter in model.parameters())  # it is published in bfloat16
    assert base_bytes > 2.4e9
    for name, module in model.named_modules():
        if name.endswith("_hc"):
            module.to_empty(device="cpu")
    assert 1e6 < save_hc(model, tmp_path).stat().st_size < 0.001 * base_bytes


def test_sharded_parameters_are_gathered_and_offloaded_ones_refused(trained, ids, tmp_path):
    sharded = HCLlamaForCausalLM(trained.config)
    sharded.load_state_dict(trained.state_dict())
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for layer in sharded.model.layers:
            alpha = distribute_tensor(layer.attn_hc.static_alpha.detach(), mesh, [Replicate()])
            layer.attn_hc.static_alpha = torch.nn.Parameter(alpha)
        assert any(isinstance(parameter, DTensor) for parameter in hc_parameters(sharded).values())
        file = save_hc(sharded, tmp_path)
        with pytest.raises(HyperConnectionFileError, match="is offloaded or sharded. Call load_hc before that"):
            load_hc(sharded, file)
    finally:
        torch.distributed.destroy_process_group()
    fresh = HCLlamaForCausalLM(trained.config)
    fresh.load_state_dict(trained.state_dict())
    for parameter in hc_parameters(fresh).values():
        torch.nn.init.zeros_(parameter)
    assert equal(load_hc(fresh.eval(), file), trained, ids)
    with torch.device("meta"):
        offloaded = HCLlamaForCausalLM(trained.config)
    with pytest.raises(HyperConnectionFileError, match="is offloaded. Load the model without offloading"):
        save_hc(offloaded, tmp_path)
    with pytest.raises(HyperConnectionFileError, match="is offloaded or sharded. Call load_hc before that"):
        load_hc(offloaded, file)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hc_mult": 2}, r"it has hc_mult=4, the model 2\. Load it onto its base, or"),
        ({"connection": "shc"}, "it has connection='dhc', the model 'shc'"),
        ({"hc_tanh": False}, "it has hc_tanh=True, the model False"),
        ({"num_hidden_layers": 2}, r"the model has no 'layers.2.attn_hc.dynamic_alpha_fn'"),
        ({"num_hidden_layers": 4}, r"the file has no 'layers.3.attn_hc.dynamic_alpha_fn'"),
        ({"hidden_size": 64}, r"its 'layers.0.attn_hc.dynamic_alpha_fn' is \[32, 5\], the model's \[64, 5\]"),
    ],
)
def test_another_model_is_refused_and_stays_as_it_is(fields, message, trained, tmp_path):
    file = save_hc(trained, tmp_path)
    other = hc_llama(**fields)
    before = deepcopy(other.state_dict())
    with pytest.raises(HyperConnectionFileError, match=message):
        load_hc(other, file)
    assert unchanged(other, before)


def test_another_base_is_refused(trained, tmp_path):
    file = save_hc(trained, tmp_path)
    with pytest.raises(HyperConnectionFileError, match="it has model_type='hc_llama', the model 'hc_mistral'"):
        load_hc(MistralForCausalLM(MistralConfig(**TINY)), file)
    with pytest.raises(HyperConnectionFileError, match="the model has no 'layers.2"):
        load_hc(AutoModelForCausalLM.from_config(llama_config(num_hidden_layers=2)), file)
    with pytest.raises(HyperConnectionFileError, match="got a Linear; give a Transformers model"):
        load_hc(torch.nn.Linear(2, 2), file)


def test_what_is_no_such_file_is_refused(trained, tmp_path):
    file = save_hc(trained, tmp_path)
    with pytest.raises(HyperConnectionFileError, match="can't be read as a safetensors file"):
        load_hc(trained, tmp_path / "missing")
    (tmp_path / "cut.safetensors").write_bytes(file.read_bytes()[:-1])
    with pytest.raises(HyperConnectionFileError, match="can't be read as a safetensors file"):
        load_hc(trained, tmp_path / "cut.safetensors")
    save_file(load_file(file), tmp_path / "plain.safetensors")
    with pytest.raises(HyperConnectionFileError, match="was not written by save_hc: its metadata has no"):
        load_hc(trained, tmp_path / "plain.safetensors")


def test_only_models_with_hyper_connections_are_saved(llama, tmp_path):
    with pytest.raises(HyperConnectionFileError, match="save_hc got a 'llama' model without hyper-connections"):
        save_hc(llama, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_earlier_file_stays_when_writing_fails(trained, tmp_path, monkeypatch):
    file = save_hc(trained, tmp_path)
    before = file.read_bytes()

    def half(tensors, path, metadata):
        path.write_bytes(b"half")
        raise OSError("no space left")

    monkeypatch.setattr(hc_file, "save_file", half)
    with pytest.raises(OSError, match="no space left"):
        save_hc(trained, tmp_path)
    assert file.read_bytes() == before
    assert os.listdir(tmp_path) == [file.name]


def test_two_that_save_to_one_place_do_not_meet(trained, tmp_path, monkeypatch):
    """As ranks of several containers do, where all have the same process id."""

    def while_another_does(tensors, part, metadata):
        monkeypatch.undo()
        save_file(tensors, part, metadata)
        save_hc(trained, tmp_path)

    monkeypatch.setattr(hc_file, "save_file", while_another_does)
    file = save_hc(trained, tmp_path)
    assert [*tmp_path.iterdir()] == [file]
    assert load_file(file).keys() == hc_parameters(trained).keys()


@pytest.mark.slow
def test_a_model_loaded_by_its_own_code_is_saved_and_loaded_too(llama, trained, ids, tmp_path):
    """Its classes are not those of this package."""
    convert_model(llama).save_pretrained(tmp_path / "converted")
    file = save_hc(trained, tmp_path)
    code = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("converted", trust_remote_code=True)
import hf_hyperconn
assert not isinstance(model, hf_hyperconn.HCLlamaForCausalLM)
hf_hyperconn.save_hc(hf_hyperconn.load_hc(model, "hyper_connections.safetensors"), "again.safetensors")
"""
    environment = {**os.environ, "HF_MODULES_CACHE": str(tmp_path / "modules")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    again = tmp_path / "again.safetensors"
    assert load_file(again).keys() == load_file(file).keys()
    assert equal(load_hc(llama, again), trained, ids)


def test_the_metadata_says_what_to_build(trained, tmp_path):
    with safe_open(save_hc(trained, tmp_path), framework="pt") as file:
        saved = json.loads(file.metadata()["hyper_connections"])
    assert saved["model_type"] == "hc_llama"
    assert (saved["connection"], saved["hc_mult"], saved["hc_tanh"], saved["hc_readout"]) == ("dhc", 4, True, "mean")


def test_connections_of_an_inner_model_are_loaded(tmp_path):
    model = convert_model(deepcopy(other_families.tiny("llava")))
    change(model)
    save_hc(model, tmp_path / "hc.safetensors")
    again = convert_model(deepcopy(other_families.tiny("llava")))
    load_hc(again, tmp_path / "hc.safetensors")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
