"""Models that have no memory, as those who estimate it make them: on the meta device, or of fake tensors."""

import pytest
import torch
from accelerate import init_empty_weights
from torch._subclasses.fake_tensor import FakeTensorMode

from hf_hyperconn import convert_model

from .conftest import TINY, hc_llama
from .marks import few
from .tiny import tiny

KINDS = {
    "dhc": {},
    "shc": {"connection": "shc"},
    "mhc": {"connection": "mhc"},
    "ihc": {"connection": "ihc"},
    "frac": {"connection": "frac"},
    "keel": {"connection": "keel", "hc_mult": 1},
    "learned readout": {"hc_readout": "learned"},
    "derf": {"norm": "derf"},
}


def made(kind: str):
    return hc_llama(**KINDS[kind]).train()


def step(model, device: str) -> None:
    """One of training, and a forward without gradients."""
    ids = torch.zeros(2, 5, dtype=torch.long, device=device)
    outputs = model(ids, labels=ids)
    assert outputs.logits.shape == (2, 5, TINY["vocab_size"])
    assert outputs.logits.device.type == device
    outputs.loss.backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())
    with torch.no_grad():
        model(ids)


@pytest.mark.parametrize("kind", few(KINDS, "dhc", "mhc", "learned readout"))
def test_meta_device(kind):
    with torch.device("meta"):
        step(made(kind), "meta")
    with init_empty_weights():
        model = made(kind)
    step(model, "meta")


@pytest.mark.filterwarnings("error::UserWarning")
@pytest.mark.parametrize("dtype", few((torch.float32, torch.bfloat16), torch.bfloat16))
@pytest.mark.parametrize("kind", few(KINDS, "dhc", "mhc", "learned readout"))
def test_fake_tensors(kind, dtype):
    torch.set_default_dtype(dtype)
    try:
        with FakeTensorMode():
            model = made(kind)
            step(model, "cpu")
            with torch.autocast("cpu", dtype=torch.bfloat16):
                step(model, "cpu")
            torch.optim.AdamW(model.parameters()).step()
            assert all(p.dtype == torch.float32 for name, p in model.named_parameters() if "_hc." in name)
    finally:
        torch.set_default_dtype(torch.float32)


def test_fake_inputs_of_a_real_model():
    model = made("dhc")
    with FakeTensorMode(allow_non_fake_inputs=True):
        ids = torch.zeros(2, 5, dtype=torch.long)
        assert model(ids, labels=ids).logits.shape == (2, 5, TINY["vocab_size"])


def test_a_model_of_any_family_converts_on_the_meta_device():
    olmo2 = tiny("olmo2")
    with torch.device("meta"):
        base = type(olmo2)(olmo2.config)
        converted = convert_model(base)
        assert converted(torch.zeros(1, 3, dtype=torch.long)).logits.is_meta
