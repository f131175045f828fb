"""Connections stay float32 when a model is cast to 16 bits."""

from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_hyperconn import HCLlamaForCausalLM, convert_model
from hf_hyperconn.conversion.verify import verify_checkpoint
from hf_hyperconn.models.sub_layers import is_of_connection

from .conftest import hc_llama, randomise_connections

CASTS = {
    "bfloat16": lambda model: model.bfloat16(),
    "half": lambda model: model.half(),
    "to": lambda model: model.to(torch.bfloat16),
    "to with device": lambda model: model.to("cpu", torch.float16),
    "to like": lambda model: model.to(torch.empty(0, dtype=torch.bfloat16)),
    "type": lambda model: model.type(torch.bfloat16),
}


def connections(model):
    """What connections and the readout hold, by name; the rest by name."""
    tensors = dict(model.named_parameters())
    own = {name: value for name, value in tensors.items() if is_of_connection(name)}
    return own, {name: value for name, value in tensors.items() if name not in own}


@pytest.mark.parametrize("cast", CASTS.values(), ids=CASTS)
@pytest.mark.parametrize(
    "fields", [{}, {"connection": "mhc", "hc_readout": "learned"}, {"connection": "frac"}], ids=str
)
def test_casts_leave_connections(fields, cast):
    model = hc_llama(**fields)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1e-3)
            parameter.grad = parameter.detach().clone()
    before = deepcopy(connections(model)[0])
    cast(model)
    own, others = connections(model)
    assert own.keys() == before.keys()
    for name, value in own.items():
        assert torch.equal(value, before[name]), name
        assert value.dtype == value.grad.dtype == torch.float32, name
    assert {value.itemsize for value in others.values()} == {2}


def test_a_cast_conversion_equals_the_cast_base_and_passes_verification(llama, ids, tmp_path):
    base, model = deepcopy(llama).bfloat16(), convert_model(llama)
    model = deepcopy(model).bfloat16()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, base(ids).logits)
    base.save_pretrained(tmp_path / "base")
    model.save_pretrained(tmp_path / "hc")
    assert verify_checkpoint(tmp_path / "hc", str(tmp_path / "base")).passed
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "hc")
    assert {value.dtype for value in connections(loaded)[0].values()} == {torch.float32}


def test_trained_values_outlive_a_cast(llama, ids):
    """In bfloat16 1.003 would be 1."""
    model = randomise_connections(convert_model(deepcopy(llama)), scale=1e-3)
    low = deepcopy(model).half().float()
    for name, value in connections(model)[0].items():
        assert torch.equal(connections(low)[0][name], value)


def test_other_moves_are_as_ever():
    model = hc_llama()
    assert {value.dtype for value in model.double().parameters()} == {torch.float64}
    assert {value.dtype for value in connections(model.half())[0].values()} == {torch.float32}
    assert all(value.is_meta for value in model.to("meta", torch.bfloat16).parameters())
    empty = model.to_empty(device="cpu")
    assert {value.dtype for value in connections(empty)[0].values()} == {torch.float32}
    assert all(value.is_shared() for value in empty.share_memory().parameters())


def test_connections_loaded_in_16_bits_stay_so(ids):
    model = hc_llama()
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.to("cpu", torch.bfloat16)
    assert {value.dtype for value in model.parameters()} == {torch.bfloat16}
    assert model(ids).logits.isfinite().all()


def test_of_a_model_loaded_in_16_bits(llama_folder):
    model = HCLlamaForCausalLM.from_prenorm(llama_folder, dtype=torch.bfloat16).half()
    assert {value.dtype for value in connections(model)[0].values()} == {torch.float32}
