"""Branches cut from a layer's forward compute what the layer does; what can't be cut is refused."""

import pytest
import torch
from torch import nn

from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.in_memory.generic import attributes_of, cut_of, layer_attributes

from .layer_forms import (
    AddsInPlace,
    AddsOnce,
    AddsTheStreamLast,
    AddsThreeTimes,
    AddsUnderACondition,
    AddsWhatItIsGiven,
    AddsWhatItMakesItself,
    CarriesOver,
    CarriesOverUnderTheStreamsName,
    CarriesOverWhatItMayMake,
    CarriesOverWhatItMayMakeAnew,
    ChangesAnArgument,
    ChangesTheLastSum,
    ChangesTheStreamInPlace,
    ChangesTheSum,
    HandsOn,
    HasOtherNames,
    HasTwoStreams,
    Layer,
    MayMakeAnewBetween,
    NormsTheResidual,
    ReadsTheResidual,
    ReadsTheStreamOfBefore,
    ReturnsEarly,
    ReturnsMore,
    ReturnsWhatItAdds,
    ScalesTheResidual,
    UsesAnArgumentTwice,
    WidensTheStream,
)


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


def test_a_layer_without_source_is_refused():
    namespace = {"nn": nn}
    exec("class Layer(nn.Module):\n    def forward(self, hidden_states): ...", namespace)
    with pytest.raises(UnsupportedCheckpointError, match="the source of Layer can't be read"):
        layer_attributes(namespace["Layer"])
