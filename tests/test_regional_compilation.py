"""Layers compiled one by one, as accelerate's regional compilation and recipes for FSDP do."""

import copy

import pytest
import torch
from accelerate.utils import compile_regions
from torch._dynamo.testing import CompileCounter
from transformers import LlamaForCausalLM

from .conftest import hc_llama, llama_config
from .marks import few
from .tolerances import COMPILED

IDS = torch.randint(3, 90, (2, 16), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def graphs_of_the_base() -> int:
    return graphs(LlamaForCausalLM(llama_config(num_hidden_layers=12)))


def graphs(model) -> int:
    """How many a training step of the model compiles to, layer by layer; its result stays the same."""
    torch.compiler.reset()
    counter = CompileCounter()
    model.config.use_cache = False
    expected = model(IDS, labels=IDS).loss
    found = compile_regions(model, backend=counter)(IDS, labels=IDS).loss
    assert torch.equal(found, expected)
    found.backward()
    return counter.frame_count


@pytest.mark.parametrize(
    ("fields", "more"),
    few(
        [
            ({}, 0),
            ({"connection": "mhc"}, 0),
            ({"connection": "shc", "hc_start": "history", "hc_readout": "weighted"}, 1),
            ({"connection": "attnres", "hc_mult": 1}, 2),
            ({"connection": "skip", "hc_mult": 2}, 0),
        ],
        ({}, 0),
    ),
    ids=str,
)
def test_layers_compile_to_the_graphs_of_the_base(fields, more, graphs_of_the_base):
    """With one more for a last layer that has a readout's parameters, and one for a number of values that grows."""
    assert graphs(hc_llama(num_hidden_layers=12, **fields)) == graphs_of_the_base + more


@pytest.fixture(params=few(["layer.compile", "torch.compile(layer)"], "layer.compile"))
def compiled(request):
    """Return a function that compiles the layers of a model one by one, and returns it with a counter of graphs."""
    torch.compiler.reset()
    counter = CompileCounter()

    def of(model):
        layers = model.model.layers
        if request.param == "layer.compile":
            for layer in layers:
                layer.compile(backend=counter)
        else:
            model.model.layers = torch.nn.ModuleList(torch.compile(layer, backend=counter) for layer in layers)
        return model, counter

    return of


def test_layers_share_one_graph_with_the_same_gradients(compiled):
    expected = hc_llama(num_hidden_layers=3, use_cache=False)
    found, counter = compiled(copy.deepcopy(expected))
    for model in (expected, found):
        model(IDS, labels=IDS).loss.backward()
    assert counter.frame_count == 1
    gradients = {name.replace("_orig_mod.", ""): p.grad for name, p in found.named_parameters()}
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, **COMPILED)


@pytest.mark.parametrize("readout", few(["mean", "sum", "weighted"], "sum"))
def test_compiled_layers_record_the_same_hidden_states(compiled, readout):
    """The readout leaves the embedding, of which there are no streams yet, as it is."""
    model = hc_llama(num_hidden_layers=2, use_cache=False, hc_readout=readout)
    expected = model(IDS, output_hidden_states=True)
    found, _ = compiled(model)
    assert torch.equal(found(IDS).logits, expected.logits)
    for _ in range(2):
        states = found(IDS, output_hidden_states=True).hidden_states
        assert all(torch.equal(*pair) for pair in zip(states, expected.hidden_states, strict=True))


def test_ends_follow_layers_that_are_removed(compiled):
    expected = hc_llama(num_hidden_layers=4, use_cache=False)
    found, counter = compiled(copy.deepcopy(expected))
    for part in (slice(None), slice(1, None), slice(None, -1)):
        for model in (expected, found):
            model.model.layers = model.model.layers[part]
            model.config.num_hidden_layers = len(model.model.layers)
        assert torch.equal(found(IDS).logits, expected(IDS).logits)
    assert counter.frame_count == 1


def test_a_model_stays_eager_beside_its_compiled_regions():
    """They have the same layers."""
    torch.compiler.reset()
    model = hc_llama(num_hidden_layers=3, use_cache=False)
    expected, counter = model(IDS).logits, CompileCounter()
    regions = compile_regions(model, backend=counter)
    assert torch.equal(regions(IDS).logits, expected)
    graphs = counter.frame_count
    assert torch.equal(model(IDS).logits, expected)
    assert torch.equal(regions(IDS).logits, expected)
    assert counter.frame_count == graphs


def test_a_whole_model_compiles_over_compiled_layers(compiled):
    """Its graph calls their `forward`, and not their compiled code."""
    model, _ = compiled(hc_llama(num_hidden_layers=2, use_cache=False))
    expected = model(IDS).logits
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(IDS).logits, expected)
