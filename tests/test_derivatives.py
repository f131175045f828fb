"""Derivatives of gradients, and the transforms of `torch.func`, against finite differences in float64."""

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask
from transformers.models.llama.modeling_llama import LlamaRMSNorm, repeat_kv

from hf_hyperconn.models import hc_step as step
from hf_hyperconn.models.hyper_connections import HyperConnection
from hf_hyperconn.models.manifold_hyper_connections import ManifoldHyperConnection

from .conftest import hc_llama
from .marks import few
from .tolerances import FINITE_DIFFERENCES, LOOP_FLOAT64

D = 6
KINDS = {
    "dhc": {},
    "shc": {"connection": "shc"},
    "mhc": {"connection": "mhc", "hc_sinkhorn_iters": 3},
    "ihc": {"connection": "ihc"},
    "frac": {"connection": "frac"},
    "keel": {"connection": "keel", "hc_mult": 1},
    "learned readout": {"hc_readout": "learned"},
}
kinds = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(autouse=True, scope="module")
def in_float64() -> Iterator[None]:
    """Attention and norms of Llama, which compute in float32 whatever they are given, keep float64."""

    def attention(module, query, key, value, mask, scaling=None, **kwargs):
        key, value = (repeat_kv(states, module.num_key_value_groups) for states in (key, value))
        weights = query @ key.transpose(2, 3) * scaling + (0.0 if mask is None else mask)
        return (weights.softmax(-1) @ value).transpose(1, 2).contiguous(), None

    def norm(self, x):
        return nn.functional.rms_norm(x, x.shape[-1:], self.weight, self.variance_epsilon)

    AttentionInterface.register("float64", attention)
    AttentionMaskInterface.register("float64", eager_mask)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaRMSNorm, "forward", norm)
        yield


@cache
def language_model(kind: str):
    """A tiny language model with random connections; tests must not change it."""
    sizes = {"num_hidden_layers": 2, "hidden_size": 16, "intermediate_size": 20, "vocab_size": 24}
    model = hc_llama(**sizes, attn_implementation="float64", **{"hc_mult": 2, **KINDS[kind]}).double()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def problem(kind: str):
    """A loss of parameters and embeddings, where to take its derivatives, and a direction to take them in."""
    model = language_model(kind)
    torch.manual_seed(1)
    embeddings = 0.5 * torch.randn(2, 4, 16, dtype=torch.float64)
    parameters = {n: p.detach() for n, p in model.named_parameters() if "embed_tokens" not in n}
    direction = {name: torch.randn_like(value) for name, value in parameters.items()}
    length = flat(direction).norm()
    direction = {name: value / length for name, value in direction.items()}

    def logits(parameters, embeddings):
        return functional_call(model, parameters, (), {"inputs_embeds": embeddings, "use_cache": False}).logits

    def loss(parameters, embeddings=embeddings):
        return logits(parameters, embeddings).log_softmax(-1)[..., 3].mean()

    return logits, loss, parameters, embeddings, direction


def as_leaves(parameters: dict) -> dict:
    return {name: value.clone().requires_grad_() for name, value in parameters.items()}


def gradient(loss, parameters: dict, **kwargs) -> torch.Tensor:
    """By the backward of our own, all parameters' as one vector; `parameters` are leaves."""
    return flat(torch.autograd.grad(loss(parameters), list(parameters.values()), **kwargs))


def flat(tensors) -> torch.Tensor:
    tensors = tensors.values() if isinstance(tensors, dict) else tensors
    return torch.cat([tensor.flatten() for tensor in tensors])


def finite_difference(function, parameters: dict, direction: dict, size: float = 1e-5) -> torch.Tensor:
    """The derivative of a function of parameters in a direction."""
    ends = [{n: p + sign * size * direction[n] for n, p in parameters.items()} for sign in (1, -1)]
    return (function(ends[0]) - function(ends[1])) / (2 * size)


def assert_close(found: torch.Tensor, expected: torch.Tensor) -> None:
    """Of the largest value."""
    rtol = FINITE_DIFFERENCES["rtol"]
    torch.testing.assert_close(found, expected, rtol=0, atol=rtol * expected.abs().max().item())


@kinds
def test_hessian_vector_products(kind):
    """By a second backward, forward over reverse, and reverse over forward."""
    _, loss, parameters, _, direction = problem(kind)
    expected = finite_difference(lambda p: gradient(loss, as_leaves(p)), parameters, direction)
    leaves = as_leaves(parameters)
    along = gradient(loss, leaves, create_graph=True) @ flat(direction)
    assert_close(flat(torch.autograd.grad(along, list(leaves.values()))), expected)
    assert_close(flat(jvp(grad(loss), (parameters,), (direction,))[1]), expected)
    assert_close(flat(grad(lambda p: jvp(loss, (p,), (direction,))[1])(parameters)), expected)


@kinds
def test_first_derivatives(kind):
    logits, loss, parameters, embeddings, direction = problem(kind)
    assert_close(flat(grad(loss)(parameters)), gradient(loss, as_leaves(parameters)))
    expected = finite_difference(loss, parameters, direction)
    assert_close(jvp(loss, (parameters,), (direction,))[1], expected)
    with forward_ad.dual_level():
        dual = {name: forward_ad.make_dual(value, direction[name]) for name, value in parameters.items()}
        assert_close(forward_ad.unpack_dual(loss(dual)).tangent, expected)

    def few(embeddings):
        return logits(parameters, embeddings)[:, -1, :3].sum(0)

    jacobian = torch.autograd.functional.jacobian(few, embeddings)
    assert_close(jacrev(few)(embeddings), jacobian)
    assert_close(jacfwd(few)(embeddings), jacobian)
    assert_close(torch.autograd.functional.jacobian(few, embeddings, vectorize=True), jacobian)


@kinds
def test_gradients_of_each_row_of_a_batch(kind):
    _, loss, parameters, embeddings, _ = problem(kind)
    found = vmap(grad(loss), (None, 0))(parameters, embeddings.unsqueeze(1))
    for i, row in enumerate(embeddings.unsqueeze(1)):
        alone = gradient(lambda p, row=row: loss(p, row), as_leaves(parameters))
        assert_close(flat([value[i] for value in found.values()]), alone)


@pytest.mark.parametrize("kind", ["dhc", "shc", "mhc"])
def test_gradient_penalty(kind):
    """The gradient, to parameters, of the norm of that to embeddings."""
    _, loss, parameters, embeddings, direction = problem(kind)

    def penalty(parameters, embeddings=embeddings):
        embeddings = embeddings.detach().requires_grad_()
        return torch.autograd.grad(loss(parameters, embeddings), embeddings, create_graph=True)[0].norm()

    leaves = as_leaves(parameters)
    found = torch.autograd.grad(penalty(leaves), list(leaves.values()), allow_unused=True)
    expected = finite_difference(lambda p: penalty(p).detach(), parameters, direction)
    along = sum((g * direction[name]).sum() for name, g in zip(leaves, found, strict=True) if g is not None)
    assert_close(along, expected)


def test_hessian_of_the_embeddings():
    logits, _, parameters, embeddings, _ = problem("dhc")
    embeddings = embeddings[:1, :2]

    def one(embeddings):
        return logits(parameters, embeddings)[0, -1, 3]

    expected = torch.autograd.functional.hessian(one, embeddings)
    assert_close(hessian(one)(embeddings), expected)
    assert_close(torch.autograd.functional.hessian(one, embeddings, vectorize=True), expected)


def two_connections(norm: str):
    """Two sub-layers as a function of the streams and of every parameter, and where to take its derivatives."""
    norms = {"rms": lambda: nn.RMSNorm(D, eps=1e-6), "layer": lambda: nn.LayerNorm(D), "static": lambda: None}
    modules = []
    for k in range(2):
        torch.manual_seed(k)
        if norm == "mhc":
            modules.append(ManifoldHyperConnection(D, 2, k, sinkhorn_iters=2).double())
        else:
            modules.append(HyperConnection(D, 2, k, norm=norms[norm]()).double())
    names = [(k, name) for k, module in enumerate(modules) for name, _ in module.named_parameters()]
    values = [modules[k].get_parameter(name).detach() for k, name in names]
    values = [(value + 0.3 * torch.randn_like(value)).requires_grad_() for value in values]
    streams = torch.randn(1, 2, 2, D, dtype=torch.float64, requires_grad=True)

    def function(streams, *values):
        given = [{name: v for (j, name), v in zip(names, values, strict=True) if j == k} for k in range(2)]
        first, second = modules
        branch_input, carry = functional_call(first, given[0], (first.take(streams),))
        branch_input, carry = functional_call(second, given[1], (carry.write(branch_input.sin()),))
        return branch_input, carry.write(branch_input.sin()).written()

    return function, (streams, *values)


@pytest.mark.parametrize(
    ("norm", "matrix"),
    [
        *[("static", True), ("rms", True), ("mhc", True)],
        *few([("rms", False), ("layer", True), ("layer", False)]),
    ],
)
def test_second_derivatives_of_connections(norm, matrix, monkeypatch):
    monkeypatch.setattr(step, "uses_matrix_products", lambda device: matrix)
    assert torch.autograd.gradgradcheck(*two_connections(norm), check_batched_grad=True, fast_mode=True)


def test_third_derivatives():
    """Of sums of sines of the derivatives before."""
    function, inputs = two_connections("rms")

    def by_steps() -> list[torch.Tensor]:
        found, orders = sum(made.sin().sum() for made in function(*inputs)), []
        for _ in range(3):
            grads = torch.autograd.grad(found, inputs, create_graph=True)
            orders.append(torch.cat([value.flatten() for value in grads]).detach())
            found = sum(value.sin().sum() for value in grads)
        return orders

    expected = by_steps()
    with forward_ad.dual_level():  # takes the plain way, whose derivatives are autograd's
        for one, other in zip(by_steps(), expected, strict=True):
            largest = other.abs().max()
            torch.testing.assert_close(one / largest, other / largest, **LOOP_FLOAT64)


@pytest.mark.parametrize("norm", ["static", "rms"])
def test_a_frozen_connection_has_second_derivatives(norm):
    function, (streams, *values) = two_connections(norm)
    frozen = [value.detach() for value in values]

    def of_streams(streams):
        return sum(made.sin().sum() for made in function(streams, *frozen))

    assert torch.autograd.gradgradcheck(of_streams, (streams,), fast_mode=True)


def test_a_branch_without_a_gradient():
    module = HyperConnection(D, 2, 0).requires_grad_(False)
    streams = torch.randn(1, 2, 2, D, requires_grad=True)
    with torch.no_grad():
        _, carry = module.width_connection(streams)
    after = replace(carry, streams=streams.sin()).write(torch.ones(1, 2, D)).written()
    (found,) = torch.autograd.grad(after.sum(), streams, create_graph=True)
    assert torch.equal(found, streams.cos())


@pytest.mark.slow
def test_compiled_transforms():
    """`torch.compile` sees a whole transform."""
    _, loss, parameters, _, direction = problem("dhc")

    def along(parameters, direction):
        return jvp(loss, (parameters,), (direction,))[1]

    torch.compiler.reset()
    compiled = torch.compile(along, backend="aot_eager", fullgraph=True)
    assert_close(compiled(parameters, direction), along(parameters, direction))
