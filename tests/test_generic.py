"""Models that are not Transformers' own: hyper-connections cut from their layers' forward, in memory."""

import pytest
import torch
from torch import nn
from transformers import LlamaForCausalLM, LlamaModel
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from hf_hyperconn import convert_model
from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.generic import attributes_of, cut_of, layer_attributes, source_of_forward
from hf_hyperconn.pairs.loops import read_layer_loop

from .conftest import llama_config

IDS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(0))


class Layer(nn.Module):
    """The form, once more: what the next layers change."""

    def forward(self, hidden_states, scale=2.0):
        residual = hidden_states
        half = hidden_states / 2
        hidden_states = residual + half * scale
        residual = hidden_states
        hidden_states = hidden_states**2
        hidden_states = residual + hidden_states
        return hidden_states


class UsesAnArgumentTwice(nn.Module):
    def forward(self, hidden_states, scale=2.0):
        residual = hidden_states
        hidden_states = residual + hidden_states * scale
        residual = hidden_states
        hidden_states = residual + hidden_states * scale
        return hidden_states


class ReadsTheResidual(nn.Module):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = hidden_states * 3
        hidden_states = residual + hidden_states.view(residual.shape)
        residual = hidden_states
        hidden_states = residual + hidden_states
        return hidden_states


class AddsTheStreamLast(nn.Module):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = hidden_states / 3
        hidden_states = hidden_states + residual
        hidden_states = hidden_states + torch.tanh(hidden_states)
        return hidden_states


class HasOtherNames(nn.Module):
    def forward(self, activations):
        raw = activations
        normed = activations / 3
        residual = normed + raw
        hidden_states = residual**2
        hidden_states = hidden_states + residual
        return hidden_states


class AddsOnce(nn.Module):
    def forward(self, x, **kwargs):
        halves = x / 2
        attention = torch.tanh(halves)
        x = attention + halves**2 + x
        return x


class AddsThreeTimes(nn.Module):
    def forward(self, x):
        x = x + x / 3
        for power in (2, 3):
            last = x**power
        x = x + last
        y = x + torch.tanh(x)
        return y


class WidensTheStream(nn.Module):
    widens = True

    def forward(self, hidden_states):
        residual = hidden_states
        if self.widens:
            residual = residual.to(torch.float32)
        hidden_states = hidden_states.to(torch.bfloat16) / 3
        hidden_states = residual + hidden_states
        return hidden_states


class CarriesOver(nn.Module):
    def forward(self, hidden_states):
        residual = hidden_states
        half = hidden_states / 2
        hidden_states = residual + half
        residual = hidden_states
        hidden_states = residual + half
        return hidden_states


class CarriesOverWhatItMayMakeAnew(nn.Module):
    def forward(self, hidden_states, anew=False):
        half = hidden_states / 2
        hidden_states = hidden_states + half
        if anew:
            half = hidden_states / 2
        hidden_states = hidden_states + half
        return hidden_states


class CarriesOverUnderTheStreamsName(nn.Module):
    def forward(self, hidden_states):
        half = hidden_states / 2
        hidden_states = hidden_states + half
        third = half / 3
        half = hidden_states
        hidden_states = hidden_states + third
        return hidden_states


class CarriesOverWhatItMayMake(nn.Module):
    def forward(self, hidden_states, halves=True):
        if halves:
            half = hidden_states / 2
        hidden_states = hidden_states + hidden_states**2
        hidden_states = hidden_states + half * hidden_states
        return hidden_states


class HandsOn(nn.Module):
    """As an adaptive norm does, whose gates later branches use."""

    def forward(self, hidden_states, scale=2.0):
        gate, *gates = torch.tanh(scale * torch.arange(3)).to(hidden_states.dtype)
        hidden_states = gate * hidden_states / 2 + hidden_states
        hidden_states = hidden_states + gates[0] * hidden_states**2
        hidden_states = hidden_states + gates[1] * torch.tanh(hidden_states)
        return hidden_states


class MayMakeAnewBetween(nn.Module):
    def forward(self, x, anew=False):
        half = x / 2
        x = x + half
        if anew:
            half = x / 3
        x = x + x**2
        x = x + half * torch.tanh(x)
        return x


class HasTwoStreams(nn.Module):
    def forward(self, hidden_states, encoded):
        both = torch.tanh(hidden_states + encoded)
        hidden_states = hidden_states + both
        encoded = encoded + both
        return encoded, hidden_states


class ChangesAnArgument(nn.Module):
    def forward(self, hidden_states, scale=2.0):
        scale = scale / 2
        hidden_states = hidden_states + hidden_states * scale
        hidden_states = hidden_states + hidden_states * scale
        return hidden_states


class ReadsTheStreamOfBefore(nn.Module):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = residual + hidden_states / 2
        hidden_states = hidden_states + residual
        return hidden_states


class ScalesTheResidual(nn.Module):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = hidden_states / 2
        hidden_states = residual * 2 + hidden_states
        residual = hidden_states
        hidden_states = residual + hidden_states
        return hidden_states


class NormsTheResidual(nn.Module):
    def forward(self, hidden_states):
        hidden_states = hidden_states / 2
        residual = hidden_states
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = residual + hidden_states
        return hidden_states


class ChangesTheSum(nn.Module):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = residual + hidden_states
        hidden_states = hidden_states * 2
        residual = hidden_states
        hidden_states = residual + hidden_states
        return hidden_states


class ChangesTheLastSum(nn.Module):
    def forward(self, hidden_states):
        hidden_states = hidden_states + hidden_states / 2
        hidden_states = hidden_states.clamp(-1, 1)
        return hidden_states


class ChangesTheStreamInPlace(nn.Module):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states.mul_(2)
        hidden_states = residual + hidden_states / 2
        return hidden_states


class AddsInPlace(nn.Module):
    def forward(self, hidden_states):
        hidden_states += hidden_states / 2
        return hidden_states


class AddsUnderACondition(nn.Module):
    def forward(self, hidden_states, parallel=False):
        half = hidden_states / 2
        if parallel:
            hidden_states = hidden_states + half
        return hidden_states


class ReturnsWhatItAdds(nn.Module):
    def forward(self, hidden_states):
        weights = hidden_states / 2
        hidden_states = hidden_states + weights
        return hidden_states, weights


class ReturnsMore(nn.Module):
    def forward(self, hidden_states):
        weights = hidden_states / 2
        hidden_states = hidden_states + weights
        return hidden_states, self.training


class AddsWhatItIsGiven(nn.Module):
    def forward(self, hidden_states, encoded=None, scale=None):
        if encoded is not None:
            hidden_states = hidden_states + encoded
        half = hidden_states / 2
        if scale is not None:
            half = half * (scale + 1)
        hidden_states = hidden_states + half
        return hidden_states


class AddsWhatItMakesItself(nn.Module):
    def forward(self, hidden_states, encoded=None):
        if encoded is None:
            encoded = hidden_states / 2
        if encoded is not None:
            hidden_states = hidden_states + encoded
        return hidden_states


class ReturnsEarly(nn.Module):
    def forward(self, hidden_states, skip=False):
        if skip:
            return hidden_states
        hidden_states = hidden_states + hidden_states / 2
        return hidden_states


def run(layer: nn.Module, x: torch.Tensor, **kwargs) -> torch.Tensor:
    """A layer by its branches, each added to the stream."""
    attributes = layer_attributes(type(layer))
    return by_branches(attributes, layer, x.float() if attributes["widened"] else x, **kwargs)


def by_branches(attributes: dict, layer: nn.Module, x: torch.Tensor, **kwargs) -> torch.Tensor:
    """`run`, of branches that have been cut."""
    for part in attributes["parts"]:
        added = attributes[part.branch](layer, x, **kwargs)
        if isinstance(added, tuple):
            added, made = added
            kwargs |= made
        x = x + added
    return x if attributes["returned"] is None else (x, *(kwargs[name] for name in attributes["returned"]))


def test_branches_are_the_layers_own_code():
    branches = layer_attributes(Layer)
    x, layer = torch.randn(3), Layer()
    assert torch.equal(branches["attention_branch"](layer, x), x)
    assert torch.equal(branches["attention_branch"](layer, x, scale=4.0), 2 * x)
    assert torch.equal(branches["mlp_branch"](layer, x), x**2)
    assert torch.equal(run(layer, x), layer(x))


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (UsesAnArgumentTwice, ["attention", "mlp"]),
        (ReadsTheResidual, ["attention", "mlp"]),
        (CarriesOver, ["attention", "mlp"]),
        (CarriesOverWhatItMayMakeAnew, ["attention", "mlp"]),
        (CarriesOverUnderTheStreamsName, ["attention", "mlp"]),
        (ChangesAnArgument, ["attention", "mlp"]),
        (HandsOn, ["block", "block_1", "block_2"]),
        (MayMakeAnewBetween, ["block", "block_1", "block_2"]),
        (AddsTheStreamLast, ["attention", "mlp"]),
        (HasOtherNames, ["attention", "mlp"]),
        (AddsOnce, ["block"]),
        (AddsThreeTimes, ["block", "block_1", "block_2"]),
        (WidensTheStream, ["block"]),
    ],
)
def test_a_chain_of_additions_is_the_layer(layer, names):
    assert [part.name for part in layer_attributes(layer)["parts"]] == names
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(50, generator=torch.Generator().manual_seed(0)).to(dtype)
        expected = layer()(x)
        assert torch.equal(run(layer(), x), expected)
        assert run(layer(), x).dtype == expected.dtype
    if layer in (UsesAnArgumentTwice, ChangesAnArgument, HandsOn):
        assert torch.equal(run(layer(), x, scale=0.3), layer()(x, scale=0.3))
    if layer in (CarriesOverWhatItMayMakeAnew, MayMakeAnewBetween):
        assert torch.equal(run(layer(), x, anew=True), layer()(x, anew=True))


def test_what_a_branch_makes_is_returned_too():
    attributes = layer_attributes(ReturnsWhatItAdds)
    assert attributes["returned"] == ("weights",)
    x = torch.randn(3)
    assert all(map(torch.equal, run(ReturnsWhatItAdds(), x), ReturnsWhatItAdds()(x)))


class DependsOnWhatItHas(nn.Module):
    """As blocks of diffusers do: which statements run is for the attributes of each to say."""

    def __init__(self, kind, attends=True):
        super().__init__()
        self.kind, self.attends, self._chunks = kind, attends, None

    def forward(self, x, objects=None):
        if self.kind == "gated":
            gate, scale = x.mean(), 2.0
        elif self.kind in ("scaled", "shifted") and self.attends is not None:
            scale = 3.0
        else:
            raise ValueError("another kind")
        added = x / scale
        if self.kind == "gated":
            added = added * gate
        x = added + x
        if x.ndim == 4:
            x = x.squeeze(1)
        if objects is not None:
            x = self.fuser(x, objects)
        if self.attends:
            x = x + x**2
        if self._chunks is not None:
            added = torch.cat([chunk / scale for chunk in x.chunk(self._chunks)])
        else:
            added = x / scale
        x = added + x
        return x


@pytest.mark.parametrize("settings", [("gated", True), ("gated", False), ("scaled", True), ("shifted", False)])
def test_attributes_of_a_layer_choose_its_branches(settings):
    layer = DependsOnWhatItHas(*settings)
    cut = cut_of(DependsOnWhatItHas, layer)
    assert len(cut.branches) == 2 + settings[1]
    branches = attributes_of(DependsOnWhatItHas, cut)
    x = torch.randn(6)
    expected = layer(x)
    for chunks in (None, 3):
        layer._chunks = chunks  # which a method of the layer may change later
        assert torch.equal(by_branches(branches, layer, x), expected)
    with pytest.raises(AttributeError, match="fuser"):  # as of the layer itself
        by_branches(branches, layer, x, objects=x)
    with pytest.raises(UnsupportedCheckpointError, match="is not a chain of branches"):
        cut_of(DependsOnWhatItHas)


def test_an_addition_of_what_may_be_given_is_left_out():
    attributes = layer_attributes(AddsWhatItIsGiven)
    assert attributes["absent"] == ("encoded",)
    x = torch.randn(3)
    assert torch.equal(run(AddsWhatItIsGiven(), x), AddsWhatItIsGiven()(x))
    assert torch.equal(run(AddsWhatItIsGiven(), x, scale=0.3), AddsWhatItIsGiven()(x, scale=0.3))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (CarriesOverWhatItMayMake, "a branch reads half, which an earlier one made in some cases"),
        (ReadsTheStreamOfBefore, "a branch reads residual, which an earlier one made .* as its stream"),
        (HasTwoStreams, "it hands encoded on, too, a second residual stream"),
        (ScalesTheResidual, "nothing is added"),
        (NormsTheResidual, "nothing is added"),
        (ChangesTheSum, "changes the stream by more"),
        (ChangesTheLastSum, "changes the stream by more"),
        (ChangesTheStreamInPlace, "in place"),
        (AddsInPlace, "in place"),
        (AddsUnderACondition, "nothing is added"),
        (AddsWhatItMakesItself, "nothing is added"),
        (ReturnsMore, "returns more than the stream"),
        (ReturnsEarly, "returns at several places"),
    ],
)
def test_what_would_not_be_exact_is_refused(layer, reason):
    with pytest.raises(UnsupportedCheckpointError, match=f"the forward of {layer.__name__} is not a chain.*{reason}"):
        layer_attributes(layer)


class SkipsLayers(nn.Module):
    def forward(self, hidden_states):
        for layer in self.layers:
            if self.training:
                continue
            hidden_states = layer(hidden_states)
        return hidden_states


class AddsBetweenLayers(nn.Module):
    def forward(self, hidden_states, extra):
        for layer in self.layers:
            hidden_states = layer(hidden_states)
            hidden_states = hidden_states + extra
        return hidden_states


class KeepsTheStream(nn.Module):
    def forward(self, hidden_states):
        kept = []
        for layer in self.layers:
            hidden_states = layer(hidden_states, kept=kept + [hidden_states])
        return hidden_states


class UsesWhatLayersReturn(nn.Module):
    def forward(self, hidden_states):
        for layer in self.layers:
            outputs = layer(hidden_states)
            hidden_states = outputs[0] + outputs[1]
        return hidden_states


class PassesOn(nn.Module):
    def forward(self, hidden_states, output_hidden_states=False):
        all_hidden_states = ()
        for layer in self.blocks:
            if output_hidden_states:
                all_hidden_states = all_hidden_states + (hidden_states,)
            outputs = layer(hidden_states, 1, scale=2)
            hidden_states = outputs[0]
        return hidden_states


class Checkpoints(nn.Module):
    """As models of diffusers do."""

    def forward(self, hidden_states, scale=2):
        for block in self.blocks:
            if torch.is_grad_enabled() and self.gradient_checkpointing:
                hidden_states = self._gradient_checkpointing_func(block, hidden_states, None, scale)
            else:
                hidden_states = block(hidden_states, mask=None, scale=scale)
        return hidden_states


class CheckpointsAnother(nn.Module):
    def forward(self, hidden_states):
        for layer in self.layers:
            if self.gradient_checkpointing:
                hidden_states = self._gradient_checkpointing_func(layer, hidden_states * 2)
            else:
                hidden_states = layer(hidden_states)
        return hidden_states


class PassesIndicesOn(nn.Module):
    def forward(self, hidden_states):
        indices = None
        for layer in self.layers:
            hidden_states, indices = layer(hidden_states, indices=indices)
        return hidden_states


class PassesAnotherName(nn.Module):
    def forward(self, hidden_states):
        for layer in self.layers:
            outputs = layer(hidden_states)
            hidden_states = outputs
        return hidden_states


@pytest.mark.parametrize(
    ("model", "layers", "expected"),
    [
        (PassesOn, "blocks", (1, True)),
        (Checkpoints, "blocks", (2, False)),
        (PassesIndicesOn, "layers", (0, True)),
        (PassesAnotherName, "layers", (0, False)),
    ],
)
def test_loops_over_layers(model, layers, expected):
    forward, *_ = source_of_forward(model)
    loop = read_layer_loop(forward, model.__name__, layers)
    assert (loop.positional, loop.takes_first) == expected


@pytest.mark.parametrize(
    "model", [SkipsLayers, AddsBetweenLayers, KeepsTheStream, UsesWhatLayersReturn, CheckpointsAnother]
)
def test_a_base_model_that_uses_the_stream_between_layers_is_refused(model):
    forward, *_ = source_of_forward(model)
    with pytest.raises(UnsupportedCheckpointError, match=f"the forward of {model.__name__} does more"):
        read_layer_loop(forward, model.__name__)


def test_a_layer_without_source_is_refused():
    namespace = {"nn": nn}
    exec("class Layer(nn.Module):\n    def forward(self, hidden_states): ...", namespace)
    with pytest.raises(UnsupportedCheckpointError, match="the source of Layer can't be read"):
        layer_attributes(namespace["Layer"])


class HalvingLayer(LlamaDecoderLayer):
    """A layer of its own, as code that came with a checkpoint may have it."""

    def forward(self, hidden_states, position_embeddings=None, **kwargs):
        residual = hidden_states
        hidden_states = self.input_layernorm(hidden_states)
        hidden_states, _ = self.self_attn(hidden_states, position_embeddings=position_embeddings, **kwargs)
        hidden_states = residual + hidden_states / 2

        residual = hidden_states
        hidden_states = self.post_attention_layernorm(hidden_states)
        hidden_states = residual + self.mlp(hidden_states)
        return hidden_states


class HalvingModel(LlamaModel):
    def __init__(self, config):
        super().__init__(config)
        self.layers = nn.ModuleList([HalvingLayer(config, i) for i in range(config.num_hidden_layers)])


class HalvingForCausalLM(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.model = HalvingModel(config)


class MyLlama(LlamaForCausalLM):
    """Transformers' own layers, in a class of one's own."""


def tiny(model_class: type[LlamaForCausalLM] = HalvingForCausalLM) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return model_class(llama_config(initializer_range=0.2)).eval()


@pytest.mark.parametrize("model_class", [HalvingForCausalLM, MyLlama])
@torch.no_grad()
def test_equal_to_the_base_but_not_saved(model_class, tmp_path):
    base = tiny(model_class)
    model = convert_model(base)
    assert type(model).__name__ == f"HC{model_class.__name__}"
    assert torch.equal(model(IDS).logits, base(IDS).logits)
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(IDS, **settings), base.generate(IDS, **settings))
    with pytest.raises(UnsupportedCheckpointError, match="Conversions of Transformers' own classes are saved whole"):
        model.save_pretrained(tmp_path)
    with pytest.raises(UnsupportedCheckpointError, match="Save its state_dict"):
        model.push_to_hub("me/mine")
    assert list(tmp_path.iterdir()) == []


def test_layers_of_several_classes_are_refused():
    model = tiny()
    model.model.layers[0] = nn.Identity()
    with pytest.raises(UnsupportedCheckpointError, match="has no `layers` of one class"):
        convert_model(model)


@torch.no_grad()
def test_the_state_can_be_kept():
    base = tiny()
    model = convert_model(base)
    model.model.layers[0].attn_hc.static_beta.add_(torch.arange(4))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    again = convert_model(tiny())
    again.load_state_dict(state)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert not torch.equal(again(IDS).logits, base(IDS).logits)


@pytest.mark.slow
def test_training_and_compilation():
    torch.manual_seed(0)
    model = convert_model(tiny(), hc_mult=2).train()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        compiled(IDS, labels=IDS).loss.backward()
        optimizer.step()
    unmoved = [name for name, p in model.named_parameters() if "_hc." in name and not p.grad.any()]
    assert unmoved == []
