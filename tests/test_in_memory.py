"""Conversion of a loaded Llama; other families in test_families.py and test_generic.py."""

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_hyperconn import convert_model
from hf_hyperconn.errors import UnsupportedCheckpointError

from .conftest import llama_config


def test_convert_model_shares_the_tensors(llama):
    hc = convert_model(llama, hc_mult=4, connection="dhc")
    parameters = dict(hc.named_parameters())
    for name, parameter in llama.named_parameters():
        assert parameters[name] is parameter
    assert hc.model.rotary_emb.inv_freq is llama.model.rotary_emb.inv_freq
    assert not any(tensor.is_meta for tensor in [*hc.parameters(), *hc.buffers()])


def test_convert_model_refuses_adapters_and_wrappers():
    base = LlamaForCausalLM(llama_config())
    base.model.layers[0].self_attn.q_proj = torch.nn.Sequential(base.model.layers[0].self_attn.q_proj)
    with pytest.raises(UnsupportedCheckpointError, match="q_proj.0.weight has no counterpart. Merge or remove"):
        convert_model(base)


def test_convert_model_refuses(llama):
    with pytest.raises(UnsupportedCheckpointError, match="got a HCLlamaForCausalLM; give it a Transformers model"):
        convert_model(convert_model(llama))
    with pytest.raises(UnsupportedCheckpointError, match="got a Linear"):
        convert_model(torch.nn.Linear(2, 2))
