# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The operators that run the kernels of attention residuals (see `attnres_kernels.py`).

Values are `[B, S, m, D]`, first ones and last ones or None, with any strides. Per token a read keeps, in float32, the
scores and the norms' 1 / sqrt(...), `[B, S, M]` each, and of the softmax the largest score and M / sum, `[B, S, 2]`.
"""

from functools import cache

import torch

from .attnres_kernels import _read, _read_backward, triton
from .computing import by_token, operator, operator_namespace, refuse_shape

_NAMESPACE = operator_namespace(__name__)
_VALUES = 16  # of a row in a thread
_CHUNKS = 1024
_OPTIONS = {"enable_fp_fusion": True}


@cache
def _sizes(size: int) -> dict[str, int]:
    """Return the constants that the kernels are compiled for."""
    block = triton.next_power_of_2(size)
    return {"BLOCK": block, "num_warps": min(16, max(1, block // (32 * _VALUES)))}


def _of_kernel(values: torch.Tensor | None, stand_in: torch.Tensor) -> tuple[torch.Tensor, int, int, int]:
    """Return a kernel's arguments for values: strides and number; of None a tensor that isn't read, and no value."""
    if values is None:
        return stand_in, 0, 0, 0
    return values, values.stride(0), values.stride(1), values.shape[1]


def _count(first: torch.Tensor, last: torch.Tensor | None) -> int:
    return first.shape[-2] + (0 if last is None else last.shape[-2])


def _read_results(
    residual: torch.Tensor, first: torch.Tensor, last: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    *tokens, size = residual.shape
    count = _count(first, last)
    scores, deviations, softmax = (
        torch.empty((*tokens, length), dtype=torch.float32, device=residual.device) for length in (count, count, 2)
    )
    branch_input = torch.empty((*tokens, size), dtype=residual.dtype, device=residual.device)
    return branch_input, scores, deviations, softmax


@operator(f"{_NAMESPACE}::read_forward", _read_results)
def read_forward(
    adds_residual: bool,
    eps: float,
    query: torch.Tensor,
    residual: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return h, `[B, S, D]`, and the scores, deviations and softmax for the backward."""
    _refuse_values(residual, first, last)
    results = _read_results(residual, first, last)
    if residual.numel() == 0:
        return results
    r, before, after = by_token(residual, 1), by_token(first, 2), by_token(last, 2)
    with torch.cuda.device_of(r):
        _read[(r.shape[0],)](
            query.contiguous(), r, r.stride(0), *_of_kernel(before, r), *_of_kernel(after, r), *results, r.shape[1],
            eps, ADDS_RESIDUAL=adds_residual, **_sizes(r.shape[1]), **_OPTIONS,
        )  # fmt: skip
    return results


def _read_backward_results(
    query: torch.Tensor, first: torch.Tensor, last: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    first_grad, last_grad = (
        query.new_empty(0) if values is None else torch.empty(values.shape, dtype=values.dtype, device=values.device)
        for values in (first, last)
    )
    return first_grad, last_grad, torch.empty_like(query, memory_format=torch.contiguous_format)


@operator(f"{_NAMESPACE}::read_backward", _read_backward_results)
def read_backward(
    adds_residual: bool,
    query: torch.Tensor,
    first: torch.Tensor,
    last: torch.Tensor | None,
    scores: torch.Tensor,
    deviations: torch.Tensor,
    softmax: torch.Tensor,
    grad: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of first values, last values (empty for None) and query, from the gradient of h."""
    _refuse_values(grad, first, last)
    first_grad, last_grad, of_query = _read_backward_results(query, first, last)
    if grad.numel() == 0:
        return first_grad, last_grad, of_query.zero_()
    g, before, after = by_token(grad, 1), by_token(first, 2), by_token(last, 2)
    count, size = g.shape
    tokens_a_chunk = -(-count // _CHUNKS)
    chunks = -(-count // tokens_a_chunk)
    partial = torch.empty((chunks, size), dtype=torch.float32, device=g.device)
    with torch.cuda.device_of(g):
        _read_backward[(chunks,)](
            query.contiguous(), *_of_kernel(before, g), *_of_kernel(after, g), scores, deviations, softmax,
            g, g.stride(0), first_grad, last_grad, partial, count, tokens_a_chunk, size,
            ADDS_RESIDUAL=adds_residual, **_sizes(size), **_OPTIONS,
        )  # fmt: skip
    return first_grad, last_grad, torch.sum(partial, 0, out=of_query)


def _refuse_values(residual: torch.Tensor, first: torch.Tensor, last: torch.Tensor | None) -> None:
    """Raise `ValueError` unless a kernel, which knows the shape of the residual alone, stays within the values."""
    refuse_shape(residual, first)
    if last is not None:
        refuse_shape(residual, last)
