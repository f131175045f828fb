"""Every arrangement against the plain architecture, and the ablations of the paper's Table 3."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from hf_hyperconn import convert_model
from hf_hyperconn.analysis.arrangements import ARRANGEMENTS, arrange, post_norm
from hf_hyperconn.analysis.observation import connections_of
from hf_hyperconn.errors import HyperConnError
from hf_hyperconn.models.connection import expand_streams, reduce_streams
from hf_hyperconn.models.hyper_connections import HyperConnection, read_and_mix_by_matrix

from .conftest import hc_llama, record_branches
from .other_families import tiny
from .tolerances import ANOTHER_ORDER

D, K = 16, 12


def branch(k: int, x: torch.Tensor) -> torch.Tensor:
    """A sub-layer with its norm: scale-invariant, as Pre-Norm's are, and different for every k."""
    return torch.sin((k + 1) * x / x.norm(dim=-1, keepdim=True)).roll(k, dims=-1)


def by_hyper_connections(name: str, n: int, x: torch.Tensor, readout: str) -> torch.Tensor:
    streams = expand_streams(x, n)
    for k in range(K):
        module = HyperConnection(D, n, k)
        alpha, beta = ARRANGEMENTS[name](n, k)
        with torch.no_grad():
            module.static_alpha.copy_(alpha)
            module.static_beta.copy_(beta)
        branch_input, carry = module.width_connection(streams)
        streams = carry.write(branch(k, branch_input)).written()
    return reduce_streams(streams, readout)


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(2, 5, D, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("n", [1, 2, 3, 4])
@torch.no_grad()
def test_sequential_is_the_residual_network(n, x):
    expected = x
    for k in range(K):
        expected = expected + branch(k, expected)
    assert torch.equal(by_hyper_connections("sequential", n, x, "mean"), expected)


@pytest.mark.parametrize("n", [2, 3, 4])
@torch.no_grad()
def test_parallel_is_groups_of_sub_layers_side_by_side(n, x):
    expected = n * x  # the first group sums the copies
    for group in range(0, K, n):
        outputs = [expected + branch(k, expected) for k in range(group, group + n)]
        expected = sum(outputs)
    torch.testing.assert_close(by_hyper_connections("parallel", n, x, "sum"), expected, **ANOTHER_ORDER)


@torch.no_grad()
def test_parallel_by_two_is_the_papers_eq_19(x):
    """The matrices that Section 3.2 prints for odd and even layers, counted from one."""
    (odd_alpha, odd_beta), (even_alpha, even_beta) = (ARRANGEMENTS["parallel"](2, k) for k in (0, 1))
    assert torch.equal(torch.cat([odd_beta[None], odd_alpha[:, 1:]]), torch.tensor([[1.0, 0], [1, 1], [1, 1]]))
    assert odd_alpha[:, 0].tolist() == [1, 1]
    assert torch.equal(torch.cat([even_beta[None], even_alpha[:, 1:]]), torch.tensor([[0.0, 1], [1, 0], [0, 1]]))
    assert even_alpha[:, 0].tolist() == [0, 1]


@torch.no_grad()
def test_two_hop_adds_the_mlp_to_what_attention_read(x):
    expected = x
    for k in range(0, K, 2):
        middle = expected + branch(k, expected)
        expected = expected + branch(k + 1, middle)
    assert torch.equal(by_hyper_connections("two_hop", 2, x, "mean"), expected)


@torch.no_grad()
def test_post_norm_is_a_matrix_that_depends_on_the_branch(x):
    """Norm(x + T(x)) with a LayerNorm without parameters; tokens and outputs of mean zero."""
    x = x - x.mean(-1, keepdim=True)
    output = branch(3, x)
    output = output - output.mean(-1, keepdim=True)
    alpha, beta = post_norm(x, output)
    read, mixed = read_and_mix_by_matrix(x.unsqueeze(-2), alpha)
    assert torch.equal(read.squeeze(-2), x)
    expected = nn.functional.layer_norm(x + output, (D,), eps=0)
    computed = mixed.squeeze(-2) + beta * output
    torch.testing.assert_close(computed, expected, **ANOTHER_ORDER)


@pytest.mark.parametrize("connection", ["shc", "dhc"])
@torch.no_grad()
def test_a_model_is_arranged(connection, ids):
    model = hc_llama(hc_mult=2, connection=connection).eval()
    plain = model(ids).logits
    arrange(model, "sequential")
    assert torch.equal(model(ids).logits, plain)  # all streams are equal, whichever is read
    arrange(model, "two_hop")
    seen = record_branches(model)
    states = model(ids, output_hidden_states=True).hidden_states
    x = states[0]
    for attention, mlp in zip(seen[::2], seen[1::2], strict=True):
        assert torch.equal(attention[0], x)
        assert torch.equal(mlp[0], x + attention[1])
        x = x + mlp[1]
    assert torch.equal(model.model.norm(x), states[-1])


def test_the_sub_layers_that_a_model_has_are_arranged():
    """By their places among those left, from zero; an encoder and a decoder each for itself."""
    peft = pytest.importorskip("peft")
    model = hc_llama(hc_mult=4, connection="shc")
    model.model.layers = nn.ModuleList([model.model.layers[place] for place in (0, 2)])
    pair = convert_model(deepcopy(tiny("t5")), connection="shc", hc_mult=4)  # whose tensors an adapter freezes
    for arranged in (model, peft.get_peft_model(pair, peft.LoraConfig(target_modules=["q"]))):
        arrange(arranged, "parallel")
    for stack in (model, pair.encoder, pair.decoder):
        for k, connection in enumerate(connections_of(stack).values()):
            alpha, beta = ARRANGEMENTS["parallel"](4, k)
            assert torch.equal(connection.static_alpha, alpha)
            assert torch.equal(connection.static_beta, beta)


def test_what_is_refused():
    with pytest.raises(HyperConnError, match=r"'parallel', 'two_hop' \(got 'zigzag'\)"):
        arrange(hc_llama(), "zigzag")
    with pytest.raises(HyperConnError, match=r"hc_mult must be 2 for the two-hop residual \(got 4\)"):
        arrange(hc_llama(hc_mult=4), "two_hop")
    with pytest.raises(HyperConnError, match="the readout of the history start reads one stream alone"):
        arrange(hc_llama(hc_mult=4, hc_start="history", hc_readout="weighted"), "parallel")
    with pytest.raises(HyperConnError, match="has no static or dynamic hyper-connections"):
        arrange(hc_llama(connection="mhc"), "sequential")
