"""Decoder layers removed, added or skipped after a model was made: the first present expands, the last reads out."""

from copy import deepcopy

import pytest
import torch
from torch import nn
from transformers import Glm4Config, Glm4ForCausalLM

from hf_hyperconn import convert_model
from hf_hyperconn.training.hc_file import save_hc

from .conftest import TINY, hc_llama, randomise_connections
from .families import FAMILIES
from .tiny import tiny


def keep(model, places):
    """Leave the model those of its layers, in that order."""
    model.model.layers = nn.ModuleList([model.model.layers[place] for place in places])
    return model


def assert_equal(model, base, ids):
    with torch.no_grad():
        outputs, expected = (either(ids, use_cache=False, output_hidden_states=True) for either in (model, base))
    assert torch.equal(outputs.logits, expected.logits)
    assert len(outputs.hidden_states) == len(expected.hidden_states)
    assert all(map(torch.equal, outputs.hidden_states, expected.hidden_states))


@pytest.mark.parametrize("connection", ["shc", "dhc", "frac"])
@pytest.mark.parametrize("places", [[0, 1], [1, 2], [1], [0, 2], [2, 1, 0], [0, 1, 0, 2], []], ids=str)
def test_a_pruned_conversion_equals_the_pruned_base(places, connection, llama, ids):
    model = keep(convert_model(llama, connection=connection), places)
    base = keep(deepcopy(llama), places)
    if len(places) < 4:  # the config still says three
        assert_equal(model, base, ids)
    model.config.num_hidden_layers = base.config.num_hidden_layers = len(places)
    assert_equal(model, base, ids)
    if places == [0, 1]:
        written = [each.generate(ids, max_new_tokens=6, do_sample=False, pad_token_id=0) for each in (model, base)]
        assert torch.equal(*written)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_of_every_family(model_type, ids):
    base = deepcopy(tiny(model_type))
    model = convert_model(base)
    model.config.num_hidden_layers = base.config.num_hidden_layers = 2  # an early exit, where the family has one
    assert_equal(model, base, ids)
    model.config.num_hidden_layers = base.config.num_hidden_layers = 3
    assert_equal(keep(model, [0, 1]), keep(base, [0, 1]), ids)


def test_of_a_family_without_files(ids):
    torch.manual_seed(0)
    base = Glm4ForCausalLM(Glm4Config(**TINY, head_dim=8)).eval()
    assert_equal(keep(convert_model(base), [0, 1]), keep(deepcopy(base), [0, 1]), ids)


def test_layers_taken_out_and_put_back_in_place(llama, ids):
    model = convert_model(llama)
    with torch.no_grad():
        last = model.model.layers.pop(2)
        assert torch.equal(model(ids).logits, keep(deepcopy(llama), [0, 1])(ids).logits)
        model.model.layers.append(last)
        assert torch.equal(model(ids).logits, llama(ids).logits)


def test_a_module_that_passes_the_streams_on(llama, ids):
    class Skip(nn.Module):
        def forward(self, hidden_states, **kwargs):
            return hidden_states

    model, base = convert_model(llama), deepcopy(llama)
    model.model.layers[1] = base.model.layers[1] = Skip()
    with torch.no_grad():
        assert torch.equal(model(ids).logits, base(ids).logits)
    for place, message in ((0, "layer 1 received hidden states"), (2, "something else stands in its place")):
        model = convert_model(llama)
        model.model.layers[place] = Skip()
        with pytest.raises(ValueError, match=message):
            model(ids)


def test_what_a_pruned_model_computes_is_what_its_streams_are_read_out_to(ids):
    """Of trained connections, too: what the second layer hands on, read out, is the last hidden state."""
    model = randomise_connections(hc_llama()).eval()
    with torch.no_grad():
        expected = model(ids, output_hidden_states=True).hidden_states[2]
        pruned = keep(model, [0, 1]).model(ids).last_hidden_state
    assert torch.equal(pruned, model.model.norm(expected))


def test_an_early_exit_with_the_learned_readout(llama, ids):
    model = convert_model(llama, hc_readout="learned")
    with torch.no_grad():
        model.model.layers[-1].hc_head.hc_base.add_(torch.tensor([0.3, -0.2, 0.0, 0.1]))
        whole = model(ids, output_hidden_states=True)
        model.config.num_hidden_layers = 2
        early = model.model(ids).last_hidden_state
        model.config.num_hidden_layers = 3
        assert torch.equal(early, model.model.norm(whole.hidden_states[2]))
        assert torch.equal(model(ids).logits, whole.logits)
    prompt = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(ids[:1], **prompt)
    assert torch.equal(model.generate(ids[:1], assistant_early_exit=1, **prompt), expected)
    assert list(model.state_dict()) == list(convert_model(llama, hc_readout="learned").state_dict())


def test_a_learned_readout_that_was_removed_is_asked_for(ids):
    model = hc_llama(hc_readout="learned").eval()
    head = model.model.layers[-1].hc_head
    keep(model, [0, 1])
    with pytest.raises(ValueError, match=r"has no readout: .* Set `hc_head` of the layer"):
        model(ids)
    model.model.layers[-1].hc_head = head
    assert model(ids).logits.shape == (2, 24, 96)


def test_an_embedding_scale_that_was_removed_is_asked_for(ids):
    with pytest.raises(ValueError, match="has no embedding_scale"):
        keep(hc_llama(norm="dyt"), [1, 2])(ids)


def test_a_last_layer_that_stands_earlier_too_is_refused(llama, ids):
    twice = keep(convert_model(llama), [0, 1, 2, 0, 1, 2])
    twice.config.num_hidden_layers = 6
    with pytest.raises(ValueError, match="the last decoder layer stands at an earlier place, too"):
        twice(ids)
    copies = keep(convert_model(llama), [0, 1, 2])
    copies.model.layers.extend(deepcopy(copies.model.layers))
    base = deepcopy(llama)
    base.model.layers.extend(deepcopy(base.model.layers))
    copies.config.num_hidden_layers = base.config.num_hidden_layers = 6
    assert_equal(copies, base, ids)


def test_streams_that_nobody_reads_out_are_refused(llama, ids):
    class Wrapper(nn.Module):
        """Hands its attributes on, but keeps what is set on it, as those for activation checkpointing do."""

        def __init__(self, wrapped):
            super().__init__()
            self.wrapped = wrapped

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(self.wrapped, name)

        def forward(self, *args, **kwargs):
            return self.wrapped(*args, **kwargs)

    model = convert_model(llama)
    model.model.layers = nn.ModuleList(map(Wrapper, model.model.layers))
    assert_equal(model, llama, ids)
    with pytest.raises(ValueError, match="the last one is inside a wrapper"):
        keep(model, [0, 1])(ids)


@pytest.mark.parametrize(
    ("fields", "places", "warned"),
    [
        ({"connection": "dhc"}, [0, 2], False),
        ({"connection": "altup", "hc_mult": 4}, [0, 2], True),
        ({"connection": "attnres", "hc_mult": 1, "hc_block": 3}, [0, 2], True),
        ({"connection": "keel", "hc_mult": 1}, [0, 1], True),
    ],
    ids=str,
)
def test_a_pruned_model_that_will_be_another_says_so_when_it_is_saved(fields, places, warned, ids, tmp_path, caplog):
    """AltUp and attention residuals with blocks count sub-layers; Keel divides by their number."""
    model = randomise_connections(hc_llama(**fields).eval())
    for name, parameter in model.named_parameters():
        if "hc_head" in name:  # attention residuals read blocks
            nn.init.normal_(parameter)
    model.save_pretrained(tmp_path / "whole")
    save_hc(model, tmp_path)
    assert "have been removed or moved" not in caplog.text
    keep(model, places).config.num_hidden_layers = 2
    save_hc(model, tmp_path)
    assert ("now, as layers have been removed or moved" in caplog.text) == warned
    caplog.clear()
    model.save_pretrained(tmp_path / "pruned")
    assert ("now, as layers have been removed or moved" in caplog.text) == warned
    again = type(model).from_pretrained(tmp_path / "pruned")
    with torch.no_grad():
        assert torch.equal(model(ids, use_cache=False).logits, again(ids).logits) == (not warned)
