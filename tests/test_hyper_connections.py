"""The algebra, against a loop from the paper's equations, finite differences and an independent package."""

import pytest
import torch
from torch import nn

from hf_hyperconn.models import hc_step
from hf_hyperconn.models.connection import expand_streams, reduce_streams
from hf_hyperconn.models.hyper_connections import HyperConnection

from .sub_layer import Norm, branch, check_gradients, randomized, written
from .tolerances import BFLOAT16_STREAMS, FLOAT32, LOOP_FLOAT64, TWO_FORMS

WIDTHS = [1, 2, 3, 4, 5, 8]
D = 32


def random_connection(n: int, *, dynamic: bool = True, tanh: bool = True, size: int = D) -> HyperConnection:
    torch.manual_seed(n)
    return randomized(HyperConnection(size, n, sub_layer=1, norm=Norm(size) if dynamic else None, tanh=tanh))


def by_the_paper(module: HyperConnection, streams: torch.Tensor, branch) -> torch.Tensor:
    """Algorithm 1 with Eqs. 2-5 and 10-13, in float64, token by token and entry by entry."""
    p = {name: value.detach().double() for name, value in module.named_parameters()}
    n, d = streams.shape[-2:]
    result = torch.empty(streams.shape, dtype=torch.float64)
    for position in torch.cartesian_prod(*map(torch.arange, streams.shape[:-2])).tolist():
        h = streams[tuple(position)].double()
        a_m, a_r, b = torch.zeros(n), torch.zeros(n, n), torch.zeros(n)
        a_m, a_r, b = a_m.double(), a_r.double(), b.double()
        for i in range(n):
            a_m[i], b[i] = p["static_alpha"][i, 0], p["static_beta"][i]
            for j in range(n):
                a_r[i, j] = p["static_alpha"][i, j + 1]
            if module.norm is not None:
                normed = h[i] / (h[i].pow(2).mean() + 1e-6).sqrt() * p["norm.weight"]
                squash = torch.tanh if module.tanh else lambda x: x
                s_a, s_b = p["dynamic_alpha_scale"], p["dynamic_beta_scale"]
                a_m[i] += (s_a * squash(normed @ p["dynamic_alpha_fn"][:, 0])).item()
                for j in range(n):
                    a_r[i, j] += (s_a * squash(normed @ p["dynamic_alpha_fn"][:, j + 1])).item()
                b[i] += (s_b * squash(normed @ p["dynamic_beta_fn"])).item()
        h_0 = sum(a_m[i] * h[i] for i in range(n))
        output = branch(h_0)
        for j in range(n):
            result[tuple(position)][j] = b[j] * output + sum(a_r[i, j] * h[i] for i in range(n))
    return result


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize(("dynamic", "tanh"), [(False, True), (True, True), (True, False)])
def test_equals_the_equations_token_by_token(n, dynamic, tanh):
    module = random_connection(n, dynamic=dynamic, tanh=tanh)
    streams = torch.randn(2, 5, n, D, dtype=torch.float64)
    expected = by_the_paper(module, streams, branch)
    torch.testing.assert_close(written(module.double(), streams), expected, **LOOP_FLOAT64)


@pytest.mark.parametrize("n", WIDTHS)
def test_equals_the_equations_in_lower_precision(n):
    module = random_connection(n)
    streams = torch.randn(2, 5, n, D)
    torch.testing.assert_close(written(module, streams), by_the_paper(module, streams, branch).float(), **FLOAT32)
    low = streams.bfloat16()
    exact = by_the_paper(module, low, lambda x: branch(x.bfloat16()).double())
    result = written(module, low)
    assert result.dtype == torch.bfloat16
    scale = exact.abs().max().item()
    torch.testing.assert_close(result.double() / scale, exact / scale, **BFLOAT16_STREAMS)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_gradients(n, dynamic):
    module = random_connection(n, dynamic=dynamic, size=6).double()
    check_gradients(module, torch.randn(1, 2, n, 6, dtype=torch.float64))


class TheirNorm(nn.Module):
    """With the eps of the package."""

    def __init__(self, weight: nn.Parameter):
        super().__init__()
        self.weight = weight

    def forward(self, x):
        return nn.functional.normalize(x, dim=-1) * D**0.5 * self.weight


@pytest.mark.parametrize("n", [2, 4, 8])
@pytest.mark.parametrize("tanh", [True, False])
def test_equals_the_hyper_connections_package(n, tanh):
    lucidrains = pytest.importorskip("hyper_connections.hyper_connections")
    ours = random_connection(n, tanh=tanh).double()
    theirs = lucidrains.HyperConnections(n, dim=D, branch=nn.Identity(), layer_index=1, tanh=tanh).double()
    with torch.no_grad():
        for name in ("static_alpha", "static_beta", "dynamic_alpha_fn", "dynamic_beta_fn"):
            getattr(theirs, name).copy_(getattr(ours, name))
        for name in ("dynamic_alpha_scale", "dynamic_beta_scale"):
            getattr(theirs, name).copy_(getattr(ours, name).squeeze())
        theirs.norm.gamma.copy_(ours.norm.weight - 1)
    streams = torch.randn(2, 5, n, D, dtype=torch.float64)
    packed = streams.permute(0, 2, 1, 3).reshape(2 * n, 5, D)
    expected = theirs(packed).reshape(2, n, 5, D).permute(0, 2, 1, 3)
    ours.norm = TheirNorm(ours.norm.weight)
    torch.testing.assert_close(written(ours, streams, branch=lambda x: x), expected, **LOOP_FLOAT64)


@pytest.mark.parametrize("n", WIDTHS)
def test_the_two_forms_agree(n, monkeypatch):
    module, streams = random_connection(n), torch.randn(3, 7, n, D)
    matrix = written(module, streams)
    monkeypatch.setattr(hc_step, "uses_matrix_products", lambda device: False)
    torch.testing.assert_close(written(module, streams), matrix, **TWO_FORMS)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
@pytest.mark.parametrize("autocast", [False, True])
def test_equivalent_initialisation_is_a_residual_connection(n, dtype, precision, autocast):
    """Exactly, whatever precision is allowed for matrix products."""
    hidden, output = torch.randn(2, 64, 128).to(dtype), torch.randn(2, 64, 128).to(dtype)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            streams = expand_streams(hidden, n)
            for k in range(2):
                module = HyperConnection(128, n, sub_layer=k, norm=Norm(128))
                branch_input, carry = module.width_connection(streams)
                assert torch.equal(branch_input, streams[..., 0, :])
                streams = carry.write(output).written()
            result = reduce_streams(streams)
    finally:
        torch.set_float32_matmul_precision(before)
    assert result.dtype == dtype
    assert torch.equal(result, hidden + output + output)


def test_coefficients_are_float32_under_bfloat16_and_autocast():
    module, streams = random_connection(4), torch.randn(2, 5, 4, D)
    module.coefficient_parameters = lambda dtype: None  # the plain way, whose carry holds them
    expected = module.coefficients(streams)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, carry = module.width_connection(streams)
    assert torch.equal(carry.beta, expected[1])
    assert carry.mixed.dtype == torch.float32
    for parameter in module.parameters():  # as engines do that cast what they load
        parameter.data = parameter.data.bfloat16()
    assert all(c.dtype == torch.float32 for c in module.coefficients(streams.bfloat16()))


@pytest.mark.parametrize("dynamic", [False, True])
def test_the_carry_holds_no_parameter(dynamic):
    """Sharded training frees parameters after the forward, and the carry is used later."""
    module = random_connection(4, dynamic=dynamic)
    _, carry = module.width_connection(torch.randn(1, 3, 4, D))
    storages = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    assert not storages & {
        part.untyped_storage().data_ptr() for part in vars(carry).values() if isinstance(part, torch.Tensor)
    }


def test_the_sum_with_a_wider_branch_output_has_its_dtype():
    module = HyperConnection(D, 2, sub_layer=0)
    _, carry = module.width_connection(torch.randn(1, 3, 2, D).bfloat16())
    assert carry.write(torch.randn(1, 3, D)).written().dtype == torch.float32


@pytest.mark.parametrize("n", range(1, 10))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mean_of_equal_streams_is_the_stream(n, dtype):
    hidden = torch.randn(4, 33, 65).to(dtype)
    assert torch.equal(reduce_streams(expand_streams(hidden, n)), hidden)


def test_readouts():
    streams = torch.randn(2, 3, 5, D, dtype=torch.float64)
    torch.testing.assert_close(reduce_streams(streams, "mean"), streams.mean(-2), **LOOP_FLOAT64)
    torch.testing.assert_close(reduce_streams(streams, "sum"), streams.sum(-2), **LOOP_FLOAT64)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("k", [0, 1, 5])
def test_initial_values(n, k):
    """Eq. 14 and Algorithm 2; float32 whatever the default dtype."""
    torch.set_default_dtype(torch.bfloat16)
    try:
        module = HyperConnection(D, n, sub_layer=k, norm=nn.RMSNorm(D))
    finally:
        torch.set_default_dtype(torch.float32)
    assert {parameter.dtype for parameter in module.parameters()} == {torch.float32}
    assert module.static_alpha.shape == (n, n + 1)
    assert module.static_alpha[:, 0].tolist() == [float(i == k % n) for i in range(n)]
    assert torch.equal(module.static_alpha[:, 1:], torch.eye(n))
    assert torch.equal(module.static_beta, torch.ones(n))
    assert module.dynamic_alpha_fn.shape == (D, n + 1)
    assert module.dynamic_beta_fn.shape == (D,)
    assert not module.dynamic_alpha_fn.any()
    assert not module.dynamic_beta_fn.any()
    assert module.dynamic_alpha_scale.tolist() == module.dynamic_beta_scale.tolist() == [torch.tensor(0.01).item()]
