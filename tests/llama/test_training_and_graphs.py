"""An HC-Llama with gradient checkpointing, compiled, exported and traced."""

import pytest
import torch

from hf_hyperconn import HCLlamaForCausalLM, HCLlamaForSequenceClassification, HCLlamaModel
from tests.conftest import hc_llama, randomise_connections, traced_logits
from tests.tolerances import COMPILED

from .conftest import hc_config


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_gives_the_same_gradients(reentrant, hc, ids):
    hc.train()
    gradients = []
    for checkpointing in (False, True):
        if checkpointing:
            hc.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
            hc.enable_input_require_grads()
        hc.zero_grad()
        hc(ids, labels=ids, use_cache=False).loss.backward()
        gradients.append({name: parameter.grad.clone() for name, parameter in hc.named_parameters()})
    assert len(gradients[0]) == len(list(hc.parameters()))
    for name, gradient in gradients[0].items():
        assert torch.equal(gradients[1][name], gradient), name


@pytest.mark.parametrize("model_class", [HCLlamaModel, HCLlamaForCausalLM, HCLlamaForSequenceClassification])
def test_the_config_switches_checkpointing_on_and_the_layer_to_wrap_is_named(model_class):
    """FSDP's automatic wrapping looks for every class of `_no_split_modules`."""
    model = model_class(hc_config(gradient_checkpointing=True))
    layers = [module for module in model.modules() if type(module).__name__ == "HCLlamaDecoderLayer"]
    assert [layer.gradient_checkpointing for layer in layers] == [True] * 3
    assert list(model._no_split_modules) == ["HCLlamaDecoderLayer"]


def test_compiles_without_breaks(ids):
    hc = randomise_connections(HCLlamaForCausalLM(hc_config(num_hidden_layers=1, initializer_range=0.2)))
    expected = hc(ids, labels=ids)
    compiled = torch.compile(hc, fullgraph=True)(ids, labels=ids)
    torch.testing.assert_close(compiled.logits, expected.logits, **COMPILED)
    compiled.loss.backward()
    assert all(parameter.grad is not None for parameter in hc.parameters())


def test_exports(hc, ids):
    program = torch.export.export(hc, (), {"input_ids": ids, "use_cache": False}, strict=False)
    with torch.no_grad():
        result = program.module()(input_ids=ids, use_cache=False).logits
        torch.testing.assert_close(result, hc(ids).logits, **COMPILED)


@pytest.mark.parametrize(
    ("connection", "hc_mult"),
    [
        *((kind, 2) for kind in ("dhc", "shc", "mhc", "ihc", "frac", "altup", "dual", "skip")),
        ("keel", 1),
        ("attnres", 1),
    ],
)
def test_traces(connection, hc_mult, ids):
    """By `torch.jit.trace`, as OpenVINO does, also where gradients would be recorded."""
    model = hc_llama(connection=connection, hc_mult=hc_mult).eval()
    assert torch.equal(traced_logits(model, ids), model(ids).logits)
