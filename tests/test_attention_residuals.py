"""Attention residuals: against a loop over a list of values, Liger's kernel, and finite differences."""

import math
import os
import subprocess
import sys

import pytest
import torch
from torch import nn

from hf_hyperconn.models.attention_residuals import AttentionReadout, AttentionResidual

from .marks import few
from .tolerances import FLOAT32, LOOP_FLOAT64

SUB_LAYERS, D = 8, 5
EPS = 1e-6
blocks = pytest.mark.parametrize("block", [1, 2, 3, 4])
forms = pytest.mark.parametrize("form", ["sum", "mean"])


def randomise(*modules: nn.Module) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in modules:
            module.query.copy_(torch.randn(module.query.shape, generator=generator))


def chain(block: int, form: str, size: int = D, sub_layers: int = SUB_LAYERS) -> tuple[list, AttentionReadout]:
    """Connections with random queries, and a readout."""
    connections = [AttentionResidual(size, k, block, form, EPS) for k in range(sub_layers)]
    readout = AttentionReadout(size, form, EPS)
    randomise(*connections, readout)
    return connections, readout


def run(connections, readout, hidden_states, queries=None) -> list[torch.Tensor]:
    """What every branch and the readout read; layers of two sub-layers exchange streams, as in a model."""
    modules = [*connections, readout]
    queries = [module.query for module in modules] if queries is None else queries

    def call(k, *args):
        return torch.func.functional_call(modules[k], {"query": queries[k]}, args)

    first, seen = connections[0], []
    streams = first.take(first.expand_streams(hidden_states))
    for k, connection in enumerate(connections):
        branch_input, carry = call(k, streams)
        seen.append(branch_input)
        streams = carry.write(branch(branch_input, k))
        if k % 2:
            streams = connection.take(streams.written())
    return [*seen, call(len(connections), streams.written())]


def branch(hidden_states: torch.Tensor, k: int) -> torch.Tensor:
    return torch.sin(hidden_states + k)


def by_the_paper(embedding: list[float], queries, block: int, form: str) -> list[list[float]]:
    """The same of one token, by loops over numbers."""
    residual, values, seen = embedding, [embedding], []
    for k, query in enumerate(queries):
        scores = [
            sum(w * x for w, x in zip(query, value, strict=True)) / math.sqrt(sum(x * x for x in value) / D + EPS)
            for value in values
        ]
        total = sum(map(math.exp, scores))
        shares = [math.exp(score) / total for score in scores]
        read = []
        for d in range(D):
            if form == "mean":
                read.append(sum(share * value[d] for share, value in zip(shares, values, strict=True)))
            else:
                deviations = (
                    (len(values) * share - 1) * value[d] for share, value in zip(shares, values, strict=True)
                )
                read.append(residual[d] + sum(deviations))
        seen.append(read)
        output = [math.sin(x + k) for x in read]
        residual = [a + b for a, b in zip(residual, output, strict=True)]
        if k % block == 0:
            values = [*values, output]
        else:
            values = [*values[:-1], [a + b for a, b in zip(values[-1], output, strict=True)]]
    return seen


@blocks
@forms
@torch.no_grad()
def test_equals_a_loop(block, form):
    connections, readout = chain(block, form)
    hidden_states = torch.randn(2, 3, D, dtype=torch.float64)
    found = torch.stack(run(connections, readout, hidden_states), dim=-2)
    queries = [module.query.tolist() for module in (*connections, readout)]
    for b, s in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        expected = by_the_paper(hidden_states[b, s].tolist(), queries, block, form)
        torch.testing.assert_close(found[b, s], torch.tensor(expected, dtype=torch.float64), **LOOP_FLOAT64)


@torch.no_grad()
def test_the_sum_is_the_mean_times_the_number_of_values():
    sums, means = (AttentionReadout(D, form) for form in ("sum", "mean"))
    for module in (sums, means):
        randomise(module)
    values = torch.randn(2, 3, 6, D, dtype=torch.float64)
    streams = torch.cat([values.sum(-2, keepdim=True), values], dim=-2)
    torch.testing.assert_close(sums(streams), 6 * means(streams), **LOOP_FLOAT64)


@blocks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@torch.no_grad()
def test_reads_the_residual_stream_at_the_start(block, dtype):
    """Through 40 sub-layers, whose number of values takes every count up to 41."""
    torch.manual_seed(0)
    connections = [AttentionResidual(64, k, block) for k in range(40)]
    residual = torch.randn(2, 3, 64, dtype=dtype)
    seen = run(connections, AttentionReadout(64), residual)
    for k, read in enumerate(seen):
        assert read.dtype == dtype
        assert torch.equal(read, residual)
        residual = residual + branch(residual, k)


@pytest.mark.parametrize("block", few((1, 3), 3))
@forms
def test_gradients_of_both_orders(block, form):
    connections, readout = chain(block, form, sub_layers=4)
    hidden_states = torch.randn(1, 2, D, dtype=torch.float64, requires_grad=True)
    queries = [module.query.detach().double().requires_grad_() for module in (*connections, readout)]

    def function(hidden_states, *queries):
        return run(connections, readout, hidden_states, queries)[-1]

    assert torch.autograd.gradcheck(function, (hidden_states, *queries))
    assert torch.autograd.gradgradcheck(function, (hidden_states, *queries))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
@forms
def test_transforms_of_functions(form):
    """Gradients of each token's own, by `torch.func` and one after another."""
    readout = AttentionReadout(D, form).double()
    streams, query = torch.randn(4, 7, D, dtype=torch.float64), torch.randn(D, dtype=torch.float64)

    def loss(query, streams):
        return torch.func.functional_call(readout, {"query": query}, (streams,)).sin().sum()

    found = torch.func.vmap(torch.func.grad(loss, argnums=(0, 1)), (None, 0))(query, streams)
    for i, token in enumerate(streams):
        inputs = (query.clone().requires_grad_(), token.clone().requires_grad_())
        expected = torch.autograd.grad(loss(*inputs), inputs)
        torch.testing.assert_close([value[i] for value in found], list(expected), **LOOP_FLOAT64)


@forms
def test_values_of_zero_have_gradients_of_both_orders(form):
    """Such as the embedding of a padding token."""
    readout = AttentionReadout(D, form).double()
    randomise(readout)
    streams = torch.zeros(1, 1, 4, D, dtype=torch.float64, requires_grad=True)
    (first,) = torch.autograd.grad(readout(streams).sum(), streams, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), streams)
    assert first.isfinite().all()
    assert second.isfinite().all()


def test_large_scores_do_not_overflow():
    readout = AttentionReadout(D)
    with torch.no_grad():
        readout.query.fill_(1e4)
    streams = torch.randn(2, 3, 5, D, requires_grad=True)
    read = readout(streams)
    read.sum().backward()
    assert read.isfinite().all()
    assert streams.grad.isfinite().all()


LIGER = """
import torch
from liger_kernel.transformers.functional import liger_attn_res
from hf_hyperconn.models.attention_residuals import AttentionReadout

ours = AttentionReadout(32, form="mean", eps=1e-6)
torch.manual_seed(0)
values = torch.randn(5, 2, 3, 32, requires_grad=True)
query = torch.randn(32, requires_grad=True)
theirs = liger_attn_res(values, query, torch.ones(32), 1e-6)
streams = torch.cat([values.sum(0, keepdim=True), values]).permute(1, 2, 0, 3)
found = torch.func.functional_call(ours, {"query": query}, (streams,))
torch.testing.assert_close(found, theirs, **TOLERANCE)
grad = torch.randn_like(found)
for name, a, b in zip(("values", "query"), *(torch.autograd.grad(x, (values, query), grad) for x in (found, theirs))):
    torch.testing.assert_close(a, b, **TOLERANCE, msg=lambda text: f"{name}: {text}")
"""


@pytest.mark.slow
def test_equals_ligers_kernel_in_the_interpreter_of_triton():
    """Its weight of the norm is 1, which is what a query without one amounts to."""
    pytest.importorskip("triton")
    pytest.importorskip("liger_kernel")
    code = LIGER.replace("TOLERANCE", repr(FLOAT32))
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=300)
