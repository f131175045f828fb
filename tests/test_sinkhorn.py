"""The iteration of mHC, against autograd through its normalisations."""

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

from hf_hyperconn.models import sinkhorn as module
from hf_hyperconn.models.sinkhorn import sinkhorn

EPS = 1e-6


def written_out(logits: torch.Tensor, iters: int) -> torch.Tensor:
    matrix = logits.softmax(-1) + EPS
    matrix = matrix / (matrix.sum(-2, keepdim=True) + EPS)
    for _ in range(iters - 1):
        matrix = matrix / (matrix.sum(-1, keepdim=True) + EPS)
        matrix = matrix / (matrix.sum(-2, keepdim=True) + EPS)
    return matrix


@pytest.mark.parametrize(
    ("n", "iters", "compiled"),
    [*((n, iters, False) for n in (2, 4, 7) for iters in (1, 2, 20)), (4, 20, True)],
)
def test_equals_autograd(n, iters, compiled):
    logits = torch.randn(3, 5, n, n, dtype=torch.float64)
    of_result = torch.randn_like(logits)
    found = []
    for function in (written_out, lambda logits, iters: sinkhorn(logits, iters, EPS)):
        if compiled:
            function = torch.compile(function, backend="aot_eager", fullgraph=True)
        leaf = logits.clone().requires_grad_()
        result = function(leaf, iters)
        result.backward(of_result)
        found.append((result.detach(), leaf.grad))
    (expected, of_expected), (result, of_logits) = found
    assert torch.equal(result, expected)
    torch.testing.assert_close(of_logits, of_expected, rtol=1e-10, atol=1e-12)


def test_finite_differences():
    logits = torch.randn(2, 3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda values: sinkhorn(values, 4, EPS), logits)


def test_a_compiler_of_training_sees_one_operator():
    """However many normalisations there are."""
    counter = CompileCounterWithBackend("eager")
    function = torch.compile(lambda logits: sinkhorn(logits, 50, EPS), backend=counter, fullgraph=True)
    function(torch.randn(2, 4, 4, requires_grad=True))
    (graph,) = counter.graphs
    assert sum(node.op == "call_function" for node in graph.graph.nodes) < 5


def test_compiled_without_gradients_equals_eager():
    function = torch.compile(lambda logits: sinkhorn(logits, 3, EPS), backend="aot_eager", fullgraph=True)
    logits = torch.randn(2, 4, 4)
    with torch.no_grad():
        assert torch.equal(function(logits), sinkhorn(logits, 3, EPS))


@pytest.mark.parametrize("operator", ["_forward_operator", "_backward_operator"])
def test_operators_are_what_they_say(operator):
    tensors = (torch.randn(2, 3, 4, 4),) * (2 if "backward" in operator else 1)
    torch.library.opcheck(getattr(module, operator), (*tensors, 3, EPS))


def test_keeps_only_its_input():
    logits = torch.randn(6, 4, 4, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        sinkhorn(logits, 20, EPS)
    assert sum(tensor.numel() for tensor in kept) == logits.numel()
