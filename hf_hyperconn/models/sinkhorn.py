# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The Sinkhorn-Knopp iteration of mHC, with a backward of its own that keeps nothing but its input.

In a compiled training step it is one operator: written out, its normalizations and their gradients would be most of a
model's code. Without gradients they are written out, because one loop over tokens decodes faster. Exports also contain
them written out, because other programs don't know the operator.
"""

import torch

from .computing import gradients, is_exporting, is_transformed, needs_autograd, operator_namespace

_NAMESPACE = operator_namespace(__name__)
COLUMNS, ROWS = -2, -1  # the dimensions to sum over


def sinkhorn(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    """Return a nearly doubly stochastic matrix `[..., N, N]`: softmax of the rows, then columns and rows in turn.

    It ends with the columns, which then sum to 1. Eq. 9 of the transpose, in the arithmetic of DeepSeek-V4's kernels.
    """
    fuses = torch.compiler.is_compiling() and not torch.is_grad_enabled()
    if fuses or is_exporting() or torch.jit.is_tracing() or is_transformed():
        return _normalized(logits, iters, eps)[-1]
    return _Sinkhorn.apply(logits, iters, eps)


class _Sinkhorn(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, iters, eps):
        ctx.save_for_backward(logits)
        ctx.settings = iters, eps
        forward = _forward_operator if torch.compiler.is_compiling() else _forward
        return forward(logits, iters, eps)

    @staticmethod
    def backward(ctx, grad):
        (logits,) = ctx.saved_tensors
        if needs_autograd():
            (of_logits,) = gradients(lambda values: _normalized(values, *ctx.settings)[-1:], (logits,), (grad,))
            return of_logits, None, None
        backward = _backward_operator if torch.compiler.is_compiling() else _backward
        return backward(logits, grad, *ctx.settings), None, None


def _divisors(iters: int) -> list[int]:
    """Return the dimension that each normalization after the softmax sums over."""
    return [COLUMNS, *[ROWS, COLUMNS] * (iters - 1)]


def _normalized(logits: torch.Tensor, iters: int, eps: float) -> list[torch.Tensor]:
    """Return the softmax, and the matrix after each normalization."""
    matrices = [logits.softmax(ROWS) + eps]
    for dim in _divisors(iters):
        matrices.append(matrices[-1] / (matrices[-1].sum(dim, keepdim=True) + eps))
    return matrices


def _forward(logits: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    matrix = logits.softmax(ROWS).add_(eps)
    for dim in _divisors(iters):
        matrix.div_(matrix.sum(dim, keepdim=True).add_(eps))
    return matrix


def _backward(logits: torch.Tensor, grad: torch.Tensor, iters: int, eps: float) -> torch.Tensor:
    first, *others = _normalized(logits, iters, eps)
    before = [first, *others[:-1]]
    for matrix, normalized, dim in reversed(list(zip(before, others, _divisors(iters), strict=True))):
        grad = (grad - (grad * normalized).sum(dim, keepdim=True)) / (matrix.sum(dim, keepdim=True) + eps)
    probabilities = first - eps
    return probabilities * (grad - (grad * probabilities).sum(ROWS, keepdim=True))


_forward_operator = torch.library.custom_op(f"{_NAMESPACE}::sinkhorn", _forward, mutates_args=())
_backward_operator = torch.library.custom_op(f"{_NAMESPACE}::sinkhorn_backward", _backward, mutates_args=())


@_forward_operator.register_fake
@_backward_operator.register_fake
def _(logits, *_):
    return torch.empty_like(logits, memory_format=torch.contiguous_format)
