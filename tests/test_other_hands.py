"""What engines and tools do to configs, carries and norms changes nothing."""

from dataclasses import fields, is_dataclass

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import LlamaForCausalLM

from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM, convert_model
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.models.hyper_connections import HyperConnection

from .conftest import TINY, hc_llama, llama_config, randomise_connections
from .isolated import printed

# as vLLM sends a config to its workers, which may have no cache of modules
SEND = """
import sys
import cloudpickle
from transformers import AutoConfig
config = AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True)
import transformers_modules
cloudpickle.register_pickle_by_value(transformers_modules)
print(cloudpickle.dumps(config).hex())
"""
RECEIVE = """
import pickle, sys, torch
from transformers import AutoModel
config = pickle.loads(bytes.fromhex(sys.stdin.read()))
assert "transformers_modules" not in sys.modules
print(config.to_json_string(use_diff=False), end="")
model = AutoModel.from_config(config, dtype=torch.bfloat16, trust_remote_code=True)
assert type(model.config).model_type == "hc_llama" and model.dtype == torch.bfloat16
"""
PRINT = """
import sys
from transformers import AutoConfig
print(AutoConfig.from_pretrained(sys.argv[1], trust_remote_code=True).to_json_string(use_diff=False), end="")
"""


def test_a_config_survives_being_pickled_by_value(llama_folder, tmp_path):
    folder = convert_checkpoint(str(llama_folder), tmp_path / "out", verify="off").path
    here, there = {"place": tmp_path, "modules": tmp_path / "here"}, {"place": tmp_path, "modules": tmp_path / "there"}
    received = printed(RECEIVE, stdin=printed(SEND, folder, **here), **there)
    assert received == printed(PRINT, folder, **here)


def rebuilt(value):
    """As what handles inputs and outputs of modules (compressed-tensors) rebuilds them: plain tuples, dataclasses."""
    if isinstance(value, tuple):
        return tuple(map(rebuilt, value))
    if is_dataclass(value):
        return type(value)(**{field.name: rebuilt(getattr(value, field.name)) for field in fields(value)})
    return value


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"connection": "shc"},
        {"connection": "frac"},
        {"connection": "mhc"},
        {"connection": "altup"},
        {"connection": "attnres", "hc_mult": 1},
        {"connection": "attnres", "hc_mult": 1, "hc_block": 2},
        {"connection": "keel", "hc_mult": 1},
        {"connection": "dual", "hc_mult": 2},
        {"connection": "skip", "hc_mult": 2},
    ],
    ids=str,
)
def test_carries_may_be_rebuilt(changes, ids):
    model = randomise_connections(hc_llama(**changes))
    expected = model(ids, labels=ids)
    expected.loss.backward()
    grads = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    for layer in model.model.layers:
        for connection in (layer.attn_hc, layer.mlp_hc):
            connection.register_forward_pre_hook(lambda module, args: rebuilt(args))
            connection.register_forward_hook(lambda module, args, output: rebuilt(output))
    found = model(ids, labels=ids)
    found.loss.backward()
    assert torch.equal(found.logits, expected.logits)
    assert all(torch.equal(p.grad, grad) for p, grad in zip(model.parameters(), grads, strict=True))


class EngineNorm(nn.Module):
    """An RMSNorm of an engine's own class, with the weight of the one that it replaces."""

    def __init__(self, weight: torch.Tensor, epsilon: float):
        super().__init__()
        self.weight, self.epsilon = weight, epsilon

    def forward(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.epsilon))


class OtherFunction(EngineNorm):
    def forward(self, x):
        return self.weight * torch.tanh(x)


class ScaledBelow(EngineNorm):
    """Told apart from an RMSNorm by its small vectors alone."""

    def forward(self, x):
        return self.weight * x / x.pow(2).mean(-1, keepdim=True).sqrt().clamp(min=1e-3)


def replaced(ids, norm_class) -> tuple[list[HyperConnection], torch.Tensor, torch.Tensor]:
    """Connections whose norms were replaced by `norm_class`, and logits before and after."""
    model = randomise_connections(hc_llama())
    expected = model(ids).logits
    connections = [module for module in model.modules() if isinstance(module, HyperConnection)]
    for connection in connections:
        connection.norm = norm_class(connection.norm.weight, connection.norm.variance_epsilon)
    return connections, expected, model(ids).logits


def test_an_engine_may_replace_norms_and_steps_are_taken_still(ids):
    connections, expected, found = replaced(ids, EngineNorm)
    assert all(connection.coefficient_parameters(torch.float32) is not None for connection in connections)
    assert torch.equal(found, expected)


@pytest.mark.parametrize("norm_class", [OtherFunction, ScaledBelow])
def test_another_function_in_the_place_of_a_norm_is_called(norm_class, ids):
    connections, expected, found = replaced(ids, norm_class)
    assert all(connection.coefficient_parameters(torch.float32) is None for connection in connections)
    assert not torch.equal(found, expected)


def test_a_norm_is_known_on_the_meta_device_and_with_fake_tensors(ids):
    forms = {module.norm_form for module in hc_llama().modules() if isinstance(module, HyperConnection)}
    assert len(forms) == 1
    assert None not in forms
    for mode in (torch.device("meta"), FakeTensorMode()):
        with mode:
            model = HCLlamaForCausalLM(HCLlamaConfig(**TINY))
        assert {module.norm_form for module in model.modules() if isinstance(module, HyperConnection)} == forms


def test_a_stage_of_a_pipeline_is_refused():
    """vLLM cuts a model in stages even when it has no plan for that, and puts such layers where others were."""

    class MissingLayer(torch.nn.Module):
        def forward(self, hidden_states, **kwargs):
            return hidden_states

    stage = convert_model(LlamaForCausalLM(llama_config())).model
    stage.layers[0] = MissingLayer()
    with pytest.raises(ValueError, match=r"layer 1 received hidden states of shape \(2, 24, 32\).*tensor parallelism"):
        stage(inputs_embeds=torch.zeros(2, 24, 32))


def test_a_norm_that_is_a_unit_of_fsdp2_is_called():
    """Its weight is there while it runs, and its gradient is reduced because it ran."""
    connection = hc_llama().model.layers[0].attn_hc
    assert connection.coefficient_parameters(torch.float32) is not None
    connection.norm.__class__ = type("FSDPLlamaRMSNorm", (type(connection.norm),), {})  # as fully_shard does
    assert connection.coefficient_parameters(torch.float32) is None
