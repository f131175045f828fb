"""Analysis of layers that are another number than were built, or of which a branch reads nothing."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from hf_hyperconn import convert_model
from hf_hyperconn.analysis.study import study
from hf_hyperconn.analysis.unfolding import unfold_static
from hf_hyperconn.errors import HyperConnError
from hf_hyperconn.training.monitor import hc_figures

from .conftest import hc_llama, randomise_connections, record_branches
from .other_families import tiny
from .tolerances import FLOAT32


@pytest.mark.parametrize("places", [[0, 2], [1, 2], [2, 1, 0], [0, 1, 1, 2]], ids=str)
def test_what_branches_read_is_what_the_matrix_says(places, ids):
    """Of static connections, after layers have been removed, moved and repeated."""
    model = randomise_connections(hc_llama(hc_mult=3, connection="shc").eval())
    model.model.layers = nn.ModuleList(deepcopy(model.model.layers[place]) for place in places)
    model.config.num_hidden_layers = len(places)
    observed, static = study(model, [ids]).matrices, unfold_static(model)
    branches = record_branches(model)
    with torch.no_grad():
        model(ids, use_cache=False)
        values = torch.stack([model.model.embed_tokens(ids), *(output for _, output in branches)]).double()
    assert observed.attention == static.attention == tuple(range(0, 2 * len(places), 2))
    assert observed.inputs.shape == (2 * len(places) + 1,) * 2
    torch.testing.assert_close(static.inputs, observed.inputs, **FLOAT32)
    for row, (read, _) in zip(observed.inputs, branches, strict=False):
        expected = torch.tensordot(row, values, 1)
        torch.testing.assert_close(read.double() / expected.abs().max(), expected / expected.abs().max(), **FLOAT32)


def test_layers_that_do_not_run_or_are_one_are_refused(ids):
    model = hc_llama(hc_mult=2).eval()
    model.config.num_hidden_layers = 2
    with pytest.raises(HyperConnError, match="not all 6 sub-layers ran: num_hidden_layers says less"):
        study(model, [ids])
    model.model.layers = nn.ModuleList([model.model.layers[place] for place in (0, 1, 0)])
    for of in (unfold_static, lambda model: study(model, [ids]), lambda model: hc_figures(model, ids)):
        with pytest.raises(HyperConnError, match=r"model\.layers has one and the same layer in several places"):
            of(model)


def test_in_a_wrapper(ids):
    model = hc_llama(hc_mult=2).eval()

    class Wrapper(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, **inputs):
            return self.model(**inputs)

    assert torch.equal(study(Wrapper(), [ids]).matrices.inputs, study(model, [ids]).matrices.inputs)


def test_sub_layers_are_in_the_order_in_which_they_run(ids):
    """Also where a connection was put in again, and is registered after the others."""
    model = randomise_connections(hc_llama(hc_mult=2, connection="shc").eval())
    expected = unfold_static(model).inputs
    for layer in model.model.layers:
        connection = layer.attn_hc
        del layer.attn_hc
        layer.attn_hc = connection
    assert torch.equal(unfold_static(model).inputs, expected)
    torch.testing.assert_close(study(model, [ids]).matrices.inputs, expected, **FLOAT32)


def test_a_branch_that_reads_nothing_has_what_was_read_for_it(ids):
    """Cohere's MLP takes what attention took: what that one adds does not reach it."""
    model = convert_model(tiny("cohere"), hc_mult=2)
    fresh = unfold_static(model).inputs
    assert torch.equal(fresh, study(model, [ids]).matrices.inputs)
    assert fresh[1].tolist() == [1, *[0] * (len(fresh) - 1)]
    studied = study(randomise_connections(model), [ids])
    assert torch.equal(studied.matrices.inputs[1:-1:2], studied.matrices.inputs[0:-1:2])
    assert torch.equal(studied.streams.read_share[1::2], studied.streams.read_share[0::2])
    torch.testing.assert_close(studied.similarity[0::2], torch.ones_like(studied.similarity[0::2]), **FLOAT32)
    assert not torch.equal(studied.matrices.inputs[2], studied.matrices.inputs[1])
