"""Layers compiled one by one, as accelerate's regional compilation and recipes for FSDP do."""

import pytest
import torch
from accelerate.utils import compile_regions
from torch._dynamo.testing import CompileCounter
from transformers import LlamaForCausalLM

from .conftest import hc_llama, llama_config


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"connection": "shc", "hc_start": "history", "hc_readout": "weighted"},
        {"connection": "mhc"},
        {"connection": "attnres", "hc_mult": 1},
    ],
    ids=str,
)
def test_layers_compile_to_three_graphs(fields, ids):
    """The first, the last, and all between."""
    graphs = {}
    for model in (LlamaForCausalLM(llama_config(num_hidden_layers=12)), hc_llama(num_hidden_layers=12, **fields)):
        torch.compiler.reset()
        counter = CompileCounter()
        model.config.use_cache = False
        expected = model(ids, labels=ids).loss
        found = compile_regions(model, backend=counter)(ids, labels=ids).loss
        assert torch.equal(found, expected)
        found.backward()
        graphs[type(model).__name__] = counter.frame_count
    assert graphs["HCLlamaForCausalLM"] == graphs["LlamaForCausalLM"] + 2
