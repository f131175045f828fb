"""Models that are not Transformers' own: hyper-connections cut from their layers' forward, in memory."""

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM

from hf_hyperconn import convert_model
from hf_hyperconn.errors import UnsupportedCheckpointError

from .conftest import llama_config
from .test_patched_code import layer, with_layers

IDS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(0))


class MyLlama(LlamaForCausalLM):
    """Transformers' own layers, in a class of one's own."""


def halving() -> LlamaForCausalLM:
    """With layers of a class of one's own, as code that came with a checkpoint may have them."""
    return with_layers(layer())


def my_llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return MyLlama(llama_config(initializer_range=0.2)).eval()


@pytest.mark.parametrize("make", [halving, my_llama])
@torch.no_grad()
def test_equal_to_the_base_but_not_saved(make, tmp_path):
    base = make()
    model = convert_model(base)
    assert type(model).__name__ == f"HC{type(base).__name__}"
    assert torch.equal(model(IDS).logits, base(IDS).logits)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(IDS, **settings), base.generate(IDS, **settings))
    with pytest.raises(UnsupportedCheckpointError, match="Conversions of Transformers' own classes are saved whole"):
        model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedCheckpointError, match="Save its state_dict"):
        model.push_to_hub("me/mine")
    assert list(tmp_path.iterdir()) == []


def test_layers_of_several_classes_are_refused():
    model = halving()
    model.model.layers[0] = nn.Identity()
    with pytest.raises(UnsupportedCheckpointError, match="has no `layers` of one class"):
        convert_model(model)


@torch.no_grad()
def test_the_state_can_be_kept():
    base = halving()
    model = convert_model(base)
    model.model.layers[0].attn_hc.static_beta.add_(torch.arange(4))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    again = convert_model(halving())
    again.load_state_dict(state)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert not torch.equal(again(IDS).logits, base(IDS).logits)


@pytest.mark.slow
def test_training_and_compilation():
    torch.manual_seed(0)
    model = convert_model(halving(), hc_mult=2).train()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        compiled(IDS, labels=IDS).loss.backward()
        optimizer.step()
    unmoved = [name for name, p in model.named_parameters() if "_hc." in name and not p.grad.any()]
    assert unmoved == []
