"""Frac-connections: against a loop from the paper, finite differences, an independent package, the paper's counts."""

import pytest
import torch
from hyper_connections.hyper_connections import HyperConnections
from torch import nn
from transformers import OlmoeConfig

from hf_hyperconn import HCOlmoeForCausalLM
from hf_hyperconn.models.frac_connections import FracConnection, narrow_norm

from .sub_layer import Norm, randomized, written
from .tolerances import LOOP_FLOAT64

D = 24
PARTS = [1, 2, 3, 4]


def random_connection(m: int, *, dynamic: bool = True, tanh: bool = True, size: int = D) -> FracConnection:
    torch.manual_seed(m)
    module = FracConnection(size, m, sub_layer=1, norm=Norm(size // m) if dynamic else None, tanh=tanh)
    return randomized(module).double()


def branch(x: torch.Tensor) -> torch.Tensor:
    """Mixes the parts, as a real branch does."""
    return torch.sin(x) + 0.5 * x.flip(-1)


def by_the_paper(module: FracConnection, hidden: torch.Tensor) -> torch.Tensor:
    """H_next = diag(b) T(Y^T H) + A^T H in float64, part by part."""
    m, p = module.hc_mult, {name: value.detach() for name, value in module.named_parameters()}
    result = torch.empty_like(hidden)
    for position in torch.cartesian_prod(*map(torch.arange, hidden.shape[:-1])).tolist():
        h = hidden[tuple(position)].chunk(m)
        alpha, beta = p["static_alpha"].clone(), p["static_beta"].clone()
        for i in range(m):
            if module.norm is not None:
                normed = h[i] / (h[i].pow(2).mean() + 1e-6).sqrt() * p["norm.weight"]
                squash = torch.tanh if module.tanh else lambda x: x
                beta[i] += (p["dynamic_beta_scale"] * squash(normed @ p["dynamic_beta_fn"])).item()
                for j in range(2 * m):
                    alpha[i, j] += (p["dynamic_alpha_scale"] * squash(normed @ p["dynamic_alpha_fn"][:, j])).item()
        read = torch.cat([sum(alpha[i, j] * h[i] for i in range(m)) for j in range(m)])
        output = branch(read).chunk(m)
        parts = [beta[j] * output[j] + sum(alpha[i, m + j] * h[i] for i in range(m)) for j in range(m)]
        result[tuple(position)] = torch.cat(parts)
    return result


def run(module: FracConnection, hidden: torch.Tensor) -> torch.Tensor:
    return module.reduce_streams(written(module, module.expand_streams(hidden), branch=branch), "mean")


@pytest.mark.parametrize("m", PARTS)
@pytest.mark.parametrize(("dynamic", "tanh"), [(False, True), (True, True), (True, False)])
def test_equals_the_equations_token_by_token(m, dynamic, tanh):
    module = random_connection(m, dynamic=dynamic, tanh=tanh)
    hidden = torch.randn(2, 5, D, dtype=torch.float64)
    torch.testing.assert_close(run(module, hidden), by_the_paper(module, hidden), **LOOP_FLOAT64)


@pytest.mark.parametrize("m", PARTS)
def test_gradients(m):
    module = random_connection(m, size=12)
    hidden = torch.randn(1, 2, 12, dtype=torch.float64, requires_grad=True)

    def function(hidden, *values):
        return written(module, module.expand_streams(hidden), *values, branch=branch)

    assert torch.autograd.gradcheck(function, (hidden, *module.parameters()))


@pytest.mark.parametrize("m", [2, 3, 4])
def test_width_connection_equals_an_independent_package(m):
    """The package puts the columns of Y and A in turn, where the paper has Y before A.

    Its depth connection is another one: b is a matrix there and starts as all ones, which sums the parts.
    """
    module = random_connection(m)
    theirs = HyperConnections(1, dim=D, num_fracs=m, branch=nn.Identity(), layer_index=0).double()
    turns = torch.arange(2 * m).view(2, m).T.flatten()
    with torch.no_grad():
        theirs.static_alpha.copy_(module.static_alpha[:, turns])
        theirs.dynamic_alpha_fn.copy_(module.dynamic_alpha_fn[:, turns])
        theirs.dynamic_alpha_scale.copy_(module.dynamic_alpha_scale[0])
    module.norm = theirs.norm
    hidden = torch.randn(2, 5, D, dtype=torch.float64)
    branch_input, mixed, _ = theirs.width_connection(hidden)
    found, carry = module.width_connection(module.expand_streams(hidden))
    torch.testing.assert_close(found, branch_input, **LOOP_FLOAT64)
    torch.testing.assert_close(carry.mixed.flatten(-2), mixed, **LOOP_FLOAT64)


@pytest.mark.parametrize("m", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_starts_as_the_residual_connection(m, dtype):
    module = FracConnection(D, m, sub_layer=3, norm=Norm(D // m))
    hidden = torch.randn(2, 5, D).to(dtype)
    branch_input, carry = module.width_connection(module.expand_streams(hidden))
    assert torch.equal(branch_input, hidden)
    output = branch(branch_input)
    assert torch.equal(carry.write(output).written().flatten(-2), hidden + output)


def test_parameter_count_of_the_paper():
    """DFC×4 adds 165,056 parameters to OLMoE-1B-7B."""
    config = OlmoeConfig(hidden_size=2048, intermediate_size=1024, num_hidden_layers=16, num_experts=64)
    with torch.device("meta"):
        model = HCOlmoeForCausalLM(HCOlmoeForCausalLM.config_class.from_prenorm(config, connection="frac"))
    assert sum(p.numel() for name, p in model.named_parameters() if "_hc." in name) == 165_056


@pytest.mark.parametrize("norm", [Norm(8), nn.LayerNorm(8), nn.LayerNorm(8, elementwise_affine=False)])
def test_the_norm_of_a_part(norm):
    x = torch.randn(3, 2)
    with torch.no_grad():
        for parameter in norm.parameters():
            parameter.copy_(torch.randn(8))
    weight = [parameter[:2].clone() for parameter in norm.parameters()]
    narrow = narrow_norm(norm, 2)
    assert all(map(torch.equal, narrow.parameters(), weight))
    assert narrow(x).shape == (3, 2)
