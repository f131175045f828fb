"""Branches cut from a layer's forward compute what the layer does; what can't be cut is refused."""

import pytest
import torch
from torch import nn

from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.in_memory.generic import cut_layer, layer_attributes

from . import layer_forms as forms


def attributes_of(layer_class: type[nn.Module]) -> dict:
    """The attributes of a layer whose branches are cut."""
    return layer_attributes(layer_class, cut_layer(layer_class))


def run(layer: nn.Module, x: torch.Tensor, attributes: dict | None = None, **kwargs) -> torch.Tensor:
    """A layer by its branches, each added to the stream."""
    attributes = attributes or attributes_of(type(layer))
    x = x.float() if attributes["widened"] else x
    for sub_layer in attributes["parts"]:
        added = attributes[sub_layer.branch](layer, x, **kwargs)
        if isinstance(added, tuple):
            added, handed_on = added
            kwargs |= handed_on
        x = x + added
    return x if attributes["returned"] is None else (x, *(kwargs[name] for name in attributes["returned"]))


def test_branches_are_the_layers_own_code():
    branches = attributes_of(forms.Layer)
    x, layer = torch.randn(3), forms.Layer()
    assert torch.equal(branches["attention_branch"](layer, x), x)
    assert torch.equal(branches["attention_branch"](layer, x, scale=4.0), 2 * x)
    assert torch.equal(branches["mlp_branch"](layer, x), x**2)
    assert torch.equal(run(layer, x), layer(x))


@pytest.mark.parametrize(
    ("layer", "names"),
    [
        (forms.UsesAnArgumentTwice, ["attention", "mlp"]),
        (forms.ReadsTheResidual, ["attention", "mlp"]),
        (forms.CarriesOverWhatItMayMakeAnew, ["attention", "mlp"]),
        (forms.CarriesOverUnderTheStreamsName, ["attention", "mlp"]),
        (forms.ChangesAnArgument, ["attention", "mlp"]),
        (forms.HandsOn, ["block", "block_1", "block_2"]),
        (forms.MayMakeAnewBetween, ["block", "block_1", "block_2"]),
        (forms.AddsTheStreamLast, ["attention", "mlp"]),
        (forms.HasOtherNames, ["attention", "mlp"]),
        (forms.AddsOnce, ["block"]),
        (forms.AddsThreeTimes, ["block", "block_1", "block_2"]),
        (forms.WidensTheStream, ["block"]),
    ],
)
def test_a_chain_of_additions_is_the_layer(layer, names):
    assert [sub_layer.name for sub_layer in attributes_of(layer)["parts"]] == names
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(50, generator=torch.Generator().manual_seed(0)).to(dtype)
        expected = layer()(x)
        assert torch.equal(run(layer(), x), expected)
        assert run(layer(), x).dtype == expected.dtype
    if layer in (forms.UsesAnArgumentTwice, forms.ChangesAnArgument, forms.HandsOn):
        assert torch.equal(run(layer(), x, scale=0.3), layer()(x, scale=0.3))
    if layer in (forms.CarriesOverWhatItMayMakeAnew, forms.MayMakeAnewBetween):
        assert torch.equal(run(layer(), x, anew=True), layer()(x, anew=True))


def test_what_a_branch_makes_is_returned_too():
    attributes = attributes_of(forms.ReturnsWhatItAdds)
    assert attributes["returned"] == ("weights",)
    x = torch.randn(3)
    assert all(map(torch.equal, run(forms.ReturnsWhatItAdds(), x), forms.ReturnsWhatItAdds()(x)))


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
    cut = cut_layer(DependsOnWhatItHas, layer)
    assert len(cut.branches) == 2 + settings[1]
    branches = layer_attributes(DependsOnWhatItHas, cut)
    x = torch.randn(6)
    expected = layer(x)
    for chunks in (None, 3):
        layer._chunks = chunks  # which a method of the layer may change later
        assert torch.equal(run(layer, x, branches), expected)
    with pytest.raises(AttributeError, match="fuser"):  # as of the layer itself
        run(layer, x, branches, objects=x)
    with pytest.raises(UnsupportedCheckpointError, match="is not a chain of branches"):
        cut_layer(DependsOnWhatItHas)


def test_an_addition_of_what_may_be_given_is_left_out():
    attributes = attributes_of(forms.AddsWhatItIsGiven)
    assert attributes["absent"] == ("encoded",)
    x = torch.randn(3)
    assert torch.equal(run(forms.AddsWhatItIsGiven(), x), forms.AddsWhatItIsGiven()(x))
    assert torch.equal(run(forms.AddsWhatItIsGiven(), x, scale=0.3), forms.AddsWhatItIsGiven()(x, scale=0.3))


@pytest.mark.parametrize(
    ("layer", "reason"),
    [
        (forms.CarriesOverWhatItMayMake, "a branch reads half, which an earlier one made in some cases"),
        (forms.ReadsTheStreamOfBefore, "a branch reads residual, which an earlier one made .* as its stream"),
        (forms.HasTwoStreams, "it hands encoded on, too, a second residual stream"),
        (forms.ScalesTheResidual, "nothing is added"),
        (forms.NormsTheResidual, "nothing is added"),
        (forms.ChangesTheSum, "changes the stream by more"),
        (forms.ChangesTheLastSum, "changes the stream by more"),
        (forms.ChangesTheStreamInPlace, "in place"),
        (forms.AddsInPlace, "in place"),
        (forms.AddsUnderACondition, "nothing is added"),
        (forms.AddsWhatItMakesItself, "nothing is added"),
        (forms.ReturnsMore, "returns more than the stream"),
        (forms.ReturnsEarly, "returns at several places"),
    ],
)
def test_what_would_not_be_exact_is_refused(layer, reason):
    with pytest.raises(UnsupportedCheckpointError, match=f"the forward of {layer.__name__} is not a chain.*{reason}"):
        attributes_of(layer)


def test_a_layer_without_source_is_refused():
    namespace = {"nn": nn}
    exec("class Layer(nn.Module):\n    def forward(self, hidden_states): ...", namespace)
    with pytest.raises(UnsupportedCheckpointError, match="the source of Layer can't be read"):
        attributes_of(namespace["Layer"])
