"""The mixture of experts as a branch: its router, its losses, its experts and its names on disk."""

import json

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, OlmoeForCausalLM
from transformers.integrations import moe

from hf_hyperconn import HCOlmoeConfig, HCOlmoeForCausalLM, convert_model
from hf_hyperconn.conversion.convert import convert_checkpoint

from .isolated import printed
from .tiny import tiny

PER_EXPERT = {f"model.layers.2.mlp.experts.7.{name}_proj.weight" for name in ("gate", "up", "down")}


@pytest.fixture(scope="module")
def base():
    return tiny("olmoe")


@pytest.fixture(scope="module")
def folder(base, tmp_path_factory):
    """The base as it is on the Hub: one tensor for each expert."""
    folder = tmp_path_factory.mktemp("olmoe") / "base"
    base.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def converted(folder):
    return convert_checkpoint(str(folder), folder.with_name("out"), hc_mult=4).path


def names(folder) -> set[str]:
    keys = set()
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            keys |= set(file.keys())
    return keys


def test_the_auxiliary_loss_counts_in_training(base, ids):
    model = convert_model(base)
    plain = model(ids, labels=ids).loss
    outputs = model(ids, labels=ids, output_router_logits=True)
    assert torch.equal(outputs.loss, plain + model.config.router_aux_loss_coef * outputs.aux_loss)
    outputs.aux_loss.backward()
    assert model.model.layers[0].mlp.gate.weight.grad.any()


def test_names_on_disk_are_the_bases(folder, converted, tmp_path):
    """One tensor for each expert, as on the Hub and as serving engines read."""
    assert names(folder) >= PER_EXPERT
    model = AutoModelForCausalLM.from_pretrained(converted)
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape == (8, 96, 32)
    model.save_pretrained(tmp_path)
    connections = {name for name in names(converted) if "_hc." in name}
    assert names(tmp_path) == names(converted) == names(folder) | connections


def test_fused_names_load_too(base, tmp_path, ids):
    base.save_pretrained(tmp_path / "base", save_original_format=False)
    assert "model.layers.2.mlp.experts.gate_up_proj" in names(tmp_path / "base")
    out = convert_checkpoint(str(tmp_path / "base"), tmp_path / "out", hc_mult=2).path
    with torch.no_grad():
        expected = OlmoeForCausalLM.from_pretrained(tmp_path / "base")(ids).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(out)(ids).logits, expected)


GROUPED = """
import json, sys
import torch
from transformers import AutoModelForCausalLM
from transformers.integrations import moe
model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)
calls = []
grouped = moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]
moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"] = lambda *args, **kwargs: calls.append(1) or grouped(*args, **kwargs)
model(torch.arange(3, 27)[None])
print(json.dumps([model.config._experts_implementation, len(calls)]))
"""


@pytest.mark.slow
def test_grouped_experts_run_under_remote_code(converted, tmp_path):
    assert json.loads(printed(GROUPED, converted, place=tmp_path)) == ["grouped_mm", 3]


def test_grouped_experts_run(base, ids, monkeypatch):
    calls = []
    grouped = moe.ALL_EXPERTS_FUNCTIONS["grouped_mm"]
    monkeypatch.setitem(
        moe.ALL_EXPERTS_FUNCTIONS, "grouped_mm", lambda *args, **kwargs: calls.append(1) or grouped(*args, **kwargs)
    )
    model = HCOlmoeForCausalLM(HCOlmoeConfig.from_prenorm(base.config))
    assert model.config._experts_implementation == "grouped_mm"
    model(ids)
    assert len(calls) == base.config.num_hidden_layers
    model.set_experts_implementation("eager")
    model(ids)
    assert len(calls) == base.config.num_hidden_layers


def test_plans_are_the_bases(base):
    model = convert_model(base)
    assert model._tp_plan == base._tp_plan
    assert model._ep_plan == base._ep_plan
    assert any("experts" in name for name in model._ep_plan)
    assert not model._pp_plan


@pytest.mark.slow
def test_compiled_decoding(ids):
    """Prefill and decoding with a static cache, as `generate` compiles them on a GPU."""
    torch.manual_seed(0)
    config = HCOlmoeConfig.from_prenorm(tiny("olmoe").config, num_hidden_layers=1, hc_mult=2)
    model = HCOlmoeForCausalLM(config).eval()
    settings = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids, **settings)
    torch._dynamo.reset()
    model.forward = torch.compile(model.forward, fullgraph=True)
    assert torch.equal(model.generate(ids, **settings, cache_implementation="static"), expected)
