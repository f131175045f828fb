"""Keel, DyT and Derf: against plain implementations of their papers, and in whole models."""

import math

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_hyperconn
from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM, convert_model
from hf_hyperconn.conversion import cli
from hf_hyperconn.models.dynamic_activations import DynamicActivation, EmbeddingScale
from hf_hyperconn.models.keel_connection import KeelConnection

from .conftest import hc_llama, llama_config, record_branches
from .families import FAMILIES, FIELDS
from .sub_layer import Norm, check_gradients, randomized, written
from .tiny import SHARED
from .tolerances import LOOP_FLOAT64

KEEL = {"connection": "keel", "hc_mult": 1}


@torch.no_grad()
def test_keel_is_its_equation(ids):
    """Section 3: x = Norm(alpha x + F(x)), alpha the number of sub-layers; the exceptions of the first block."""
    model = randomized(hc_llama(**KEEL), 0.1).eval()
    seen = record_branches(model)
    states = model(ids, output_hidden_states=True).hidden_states
    sub_layers = 2 * model.config.num_hidden_layers
    assert len(seen) == sub_layers
    x = states[0]
    for k, (branch_input, output) in enumerate(seen):
        assert torch.equal(branch_input, x)
        layer = model.model.layers[k // 2]
        norm = (layer.attn_hc if k % 2 == 0 else layer.mlp_hc).norm
        x = (sub_layers if k > 1 else 1) * x + output
        if k > 0:
            x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + model.config.rms_norm_eps) * norm.weight
        if k % 2 and k < sub_layers - 1:
            assert torch.equal(states[k // 2 + 1], x)
    assert torch.equal(model.model.norm(x), states[-1])


@pytest.mark.parametrize("k", [0, 1, 2, 5])
def test_keel_token_by_token_and_by_finite_differences(k):
    torch.manual_seed(k)
    module = randomized(KeelConnection(8, k, 6, norm=Norm(8)), 0.1).double()
    streams = torch.randn(2, 3, 1, 8, dtype=torch.float64, requires_grad=True)
    found = written(module, streams, branch=torch.sin).detach()
    for position in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        x = streams.detach()[tuple(position)][0]
        total = (6 if k > 1 else 1) * x + torch.sin(x)
        if k > 0:
            total = total / (total.pow(2).mean() + 1e-6).sqrt() * module.norm.weight.detach()
        torch.testing.assert_close(found[tuple(position)][0], total, **LOOP_FLOAT64)
    check_gradients(module, streams)


@pytest.mark.parametrize("kind", ["dyt", "derf"])
def test_dynamic_activations_are_their_equations(kind):
    torch.manual_seed(0)
    module = randomized(DynamicActivation(8, kind, 0.7), 0.1).double()
    x = torch.randn(3, 5, 8, dtype=torch.float64, requires_grad=True)
    p = {name: value.tolist() for name, value in module.named_parameters()}
    for index in torch.cartesian_prod(torch.arange(3), torch.arange(5), torch.arange(8)).tolist():
        value, channel = x[tuple(index)].item(), index[-1]
        if kind == "dyt":
            expected = p["weight"][channel] * math.tanh(p["alpha"][0] * value)
        else:
            inner = p["alpha"][0] * value + p["shift"][0]
            expected = p["weight"][channel] * math.erf(inner) + p["bias"][channel]
        assert math.isclose(module(x)[tuple(index)].item(), expected, rel_tol=1e-12, abs_tol=1e-12)
    names, values = zip(*module.named_parameters(), strict=True)
    assert torch.autograd.gradcheck(
        lambda x, *values: torch.func.functional_call(module, dict(zip(names, values, strict=True)), (x,)),
        (x, *values),
    )


@pytest.mark.parametrize("kind", ["dyt", "derf"])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_no_norm_is_left_in_any_family(model_type, kind):
    family = FAMILIES[model_type]
    config = getattr(hf_hyperconn, f"HC{family.name}Config")(**{**SHARED, **FIELDS[model_type], "norm": kind})
    model = getattr(hf_hyperconn, f"HC{family.name}ForCausalLM")(config)
    assert not [name for name, module in model.named_modules() if "Norm" in type(module).__name__]
    assert isinstance(model.model.norm, DynamicActivation)
    assert [name for name, module in model.named_modules() if isinstance(module, EmbeddingScale)] == [
        "model.layers.0.embedding_scale"
    ]
    ids = torch.randint(3, 96, (2, 8))
    model(ids, labels=ids).loss.backward()
    assert all(module.alpha.grad is not None for module in (model.model.norm, model.model.layers[0].attn_hc.norm))


@pytest.mark.parametrize(
    ("width", "attention", "other"),
    [(64, 1.0, 1.0), (1024, 1.0, 1.0), (2048, 1.0, 0.5), (4096, 0.8, 0.2), (5120, 0.6, 0.15), (8192, 0.2, 0.05)],
)
def test_initial_alphas_are_the_papers(width, attention, other):
    """Tables 10 and 11 of the DyT paper."""
    config = HCLlamaConfig(hidden_size=width, num_attention_heads=4, num_hidden_layers=1, norm="dyt", vocab_size=8)
    with torch.device("meta"):
        model = HCLlamaForCausalLM(config)
    layer = model.model.layers[0]
    found = [m.initial_alpha for m in (layer.input_layernorm, layer.post_attention_layernorm, model.model.norm)]
    assert found == [attention, other, other]


def test_initial_values_and_those_of_the_config():
    model = hc_llama(norm="dyt", norm_alpha_attention=0.9, norm_alpha_other=0.3)
    layer = model.model.layers[1]
    assert layer.input_layernorm.alpha.item() == pytest.approx(0.9)
    assert layer.post_attention_layernorm.alpha.item() == pytest.approx(0.3)
    assert torch.equal(layer.input_layernorm.weight, torch.ones(32))
    assert model.model.layers[0].embedding_scale.weight.item() == pytest.approx(32**0.5)


def test_keel_is_not_converted_to(llama_folder, tmp_path, capsys):
    with pytest.raises(SystemExit):
        cli.main(["convert", str(llama_folder), str(tmp_path / "out"), "--connection", "keel", "-n", "1"])
    assert "(got 'keel')" in capsys.readouterr().err
    with pytest.raises(ValueError, match="Keel norms the residual stream"):
        convert_model(LlamaForCausalLM(llama_config()), connection="keel", hc_mult=1)
