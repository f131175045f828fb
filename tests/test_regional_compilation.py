"""Layers compiled one by one, as accelerate's regional compilation and recipes for FSDP do."""

import pytest
import torch
from accelerate.utils import compile_regions
from torch._dynamo.testing import CompileCounter
from transformers import LlamaForCausalLM

from .conftest import hc_llama, llama_config
from .marks import few


@pytest.fixture(scope="module")
def graphs_of_the_base() -> int:
    return graphs(LlamaForCausalLM(llama_config(num_hidden_layers=12)))


def graphs(model) -> int:
    """How many a training step of the model compiles to, layer by layer; its result stays the same."""
    ids = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(0))
    torch.compiler.reset()
    counter = CompileCounter()
    model.config.use_cache = False
    expected = model(ids, labels=ids).loss
    found = compile_regions(model, backend=counter)(ids, labels=ids).loss
    assert torch.equal(found, expected)
    found.backward()
    return counter.frame_count


@pytest.mark.parametrize(
    "fields",
    few(
        [
            {},
            {"connection": "shc", "hc_start": "history", "hc_readout": "weighted"},
            {"connection": "mhc"},
            {"connection": "attnres", "hc_mult": 1},
        ],
        {},
    ),
    ids=str,
)
def test_layers_compile_to_three_graphs(fields, graphs_of_the_base):
    """The first, the last, and all between."""
    assert graphs(hc_llama(num_hidden_layers=12, **fields)) == graphs_of_the_base + 2
