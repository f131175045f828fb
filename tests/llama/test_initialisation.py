"""What an HC-Llama starts from, on every path to one."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_hyperconn import HCLlamaForCausalLM, HCLlamaModel, HyperConnection, convert_model

from .conftest import hc_config


def assert_equivalent_initialisation(model):
    connections = [module for module in model.modules() if isinstance(module, HyperConnection)]
    assert len(connections) == 2 * model.config.num_hidden_layers
    for k, module in enumerate(connections):
        assert module.sub_layer == k
        for name, value in module.initial_values().items():
            assert torch.equal(getattr(module, name).detach(), value), name
        if module.norm is not None:
            assert torch.equal(module.norm.weight.detach(), torch.ones(model.config.hidden_size))


@pytest.mark.parametrize("connection", ["shc", "dhc"])
def test_initialisation_on_every_path(connection, llama_folder, llama, tmp_path):
    config = hc_config(hc_mult=4, connection=connection)
    assert_equivalent_initialisation(HCLlamaForCausalLM(config))
    assert_equivalent_initialisation(AutoModelForCausalLM.from_config(config))
    low = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    assert_equivalent_initialisation(low)
    assert low.lm_head.weight.dtype == torch.bfloat16
    assert_equivalent_initialisation(HCLlamaForCausalLM.from_prenorm(llama_folder, connection=connection))
    assert_equivalent_initialisation(HCLlamaModel.from_prenorm(llama_folder, connection=connection))
    assert_equivalent_initialisation(convert_model(llama, connection=connection))
    with torch.device("meta"):
        model = HCLlamaForCausalLM(config)
    model = model.to_empty(device="cpu")
    for module in model.modules():
        module._is_hf_initialized = False
    model.initialize_weights()
    assert_equivalent_initialisation(model)


@pytest.mark.parametrize("connection", ["shc", "dhc", "mhc", "ihc", "frac"])
def test_output_projections_are_scaled_as_the_paper_of_the_connection_says(connection):
    model = HCLlamaForCausalLM(hc_config(connection=connection, hc_mult=4, hidden_size=256, intermediate_size=512))
    layer = model.model.layers[1]
    expected = 0.01 if connection in ("shc", "dhc") else 0.02
    for scaled in (layer.self_attn.o_proj, layer.mlp.down_proj):
        assert scaled.weight.std().item() == pytest.approx(expected, rel=0.05)
    for plain in (layer.self_attn.q_proj, layer.mlp.up_proj):
        assert plain.weight.std().item() == pytest.approx(0.02, rel=0.05)
