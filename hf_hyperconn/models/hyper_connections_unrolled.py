# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Steps (see `hyper_connections_step.py`) as sums written out over streams and coefficients, for a compiler to fuse.

No setting of matrix products can make them lossy. Every wide operation has the range of tokens and D, so that Inductor
turns each half of a step into two passes over D; values of one token are materialised in between (`_own`), so that the
passes become one loop over tokens, whose rows are still in the cache in the second.
"""

from collections.abc import Iterable
from functools import reduce
from operator import add

import torch

from .hyper_connections_torch import Read, Reader, ReaderGrads, steps_of

# tokens whose part of the projection's gradient is summed before the parts are
PART = 16


def write(streams: torch.Tensor, coefficients: torch.Tensor, branch_output: torch.Tensor) -> torch.Tensor:
    """H = A_r^T S + b (outer) f, `[B, S, N, D]`."""
    dtype = torch.promote_types(streams.dtype, branch_output.dtype)
    rows, output = _rows(streams, coefficients.dtype), branch_output.to(coefficients.dtype)
    mix, beta = coefficients[..., 1:-1], coefficients[..., -1]
    return torch.stack(
        [(_mixed(mix[..., j], rows) + beta[..., j, None] * output).to(dtype) for j in range(len(rows))], -2
    )


def write_backward(
    grad: torch.Tensor, coefficients: torch.Tensor, branch_output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the gradient of H, those of b `[B, S, N]` and of f `[B, S, D]`."""
    rows, output = _rows(grad, coefficients.dtype), branch_output.to(coefficients.dtype)
    grad_beta = torch.stack([(row * output).sum(-1) for row in rows], dim=-1)
    return grad_beta, _mixed(coefficients[..., -1], rows).to(branch_output.dtype)


def read(streams: torch.Tensor, reader: Reader) -> Read:
    """The branch input x = A_m^T H of streams `[B, S, N, D]`, and the coefficients."""
    rows = _rows(streams, reader.static_alpha.dtype)
    if reader.fn is None:
        return Read(_mixed(reader.static[:, 0], rows).to(streams.dtype), reader.static)
    fn = _own(reader.fn)
    variances = [(row * row).mean(-1) for row in rows]
    products = [[(row * of_column).sum(-1) for of_column in fn.unbind(0)] for row in rows]
    mean = None
    if reader.centred:
        means, sums = [row.mean(-1) for row in rows], fn.sum(-1)
        variances = [variance - mean * mean for variance, mean in zip(variances, means, strict=True)]
        products = [
            [product - mean * sums[c] for c, product in enumerate(of_row)]
            for of_row, mean in zip(products, means, strict=True)
        ]
        mean = torch.stack(means, dim=-1)
    deviations = [torch.rsqrt(variance + reader.eps) for variance in variances]
    predicted = _tile(
        [[product * deviation for product in of_row] for of_row, deviation in zip(products, deviations, strict=True)]
    )
    coefficients = _own(reader.static + reader.scale * reader.squash(predicted))
    branch_input = _mixed(coefficients[..., 0], rows).to(streams.dtype)
    return Read(branch_input, coefficients, predicted, torch.stack(deviations, dim=-1), mean)


def read_backward(
    streams: torch.Tensor,
    reader: Reader,
    result: Read,
    grad_mixed: torch.Tensor,
    grad_input: torch.Tensor,
    grad_beta: torch.Tensor | None,
    wants_fn: bool,
) -> tuple[torch.Tensor, ReaderGrads]:
    """From the gradients of A_r^T H, of x and of b, those of H and of the reader."""
    coefficients, n, size = result.coefficients, *streams.shape[-2:]
    rows, mixed = _rows(streams, coefficients.dtype), _rows(grad_mixed, coefficients.dtype)
    inputs, columns = grad_input.to(coefficients.dtype), range(n + 2)
    of_used = [[(row * other).sum(-1) for other in (inputs, *mixed)] for row in rows]
    of_beta = [torch.zeros_like(of_used[0][0]) if grad_beta is None else grad_beta[..., i] for i in range(n)]
    of_used = [[*of_row, beta] for of_row, beta in zip(of_used, of_beta, strict=True)]
    of_static = _sums([value for of_row in of_used for value in of_row]).unflatten(0, (n, n + 2))
    terms = [
        [coefficients[..., i, 0, None] * inputs, *(coefficients[..., i, j + 1, None] * mixed[j] for j in range(n))]
        for i in range(n)
    ]
    if reader.fn is None:
        grad = torch.stack([_total(of_row).to(streams.dtype) for of_row in terms], dim=-2)
        return grad, ReaderGrads(of_static)

    # what the gradient of a coefficient is multiplied with, for that of <h_i, fn_c> and, through the norm, of h_i
    squashed = reader.squash(result.predicted)
    slope = reader.scale * (1 - squashed * squashed) if reader.tanh else reader.scale.expand_as(squashed)
    of_product = _own(slope * result.deviation.unsqueeze(-1))
    of_norm = _own(slope * result.predicted * (result.deviation * result.deviation).unsqueeze(-1) / size)
    scaled = [[_own(of_used[i][c] * of_product[..., i, c]) for c in columns] for i in range(n)]
    by_value = [_own(_total(of_used[i][c] * of_norm[..., i, c] for c in columns)) for i in range(n)]
    fn = _own(reader.fn)
    grads = []
    for i, row in enumerate(rows):
        of_row = [*terms[i], *(scaled[i][c].unsqueeze(-1) * fn[c] for c in columns)]
        if reader.centred:
            of_mean = _total(scaled[i][c] * fn[c].sum() for c in columns) / size
            of_row.append(_own(by_value[i] * result.mean[..., i] - of_mean).unsqueeze(-1))
        grads.append((_total(of_row) - by_value[i].unsqueeze(-1) * row).to(streams.dtype))
    of_scale = _sums([_total(of_used[i][c] * squashed[..., i, c] for i in range(n)) for c in columns])
    of_offset = None
    if reader.offset is not None:
        of_offset = _sums([_total(of_used[i][c] * slope[..., i, c] for i in range(n)) for c in columns])
    of_fn = _projection_backward(rows, scaled, result.mean) if wants_fn else None
    return torch.stack(grads, dim=-2), ReaderGrads(of_static, of_fn, of_offset, of_scale)


def _projection_backward(
    rows: list[torch.Tensor], scaled: list[list[torch.Tensor]], mean: torch.Tensor | None
) -> torch.Tensor:
    """The gradient of `fn`, `[N+2, D]`, from those of <h_i, fn_c>."""
    rows = [row.flatten(0, -2) for row in rows]
    part = PART if rows[0].shape[0] % PART == 0 else 1
    columns = []
    for of_column in zip(*scaled, strict=True):
        by_token = _total(value.reshape(-1, 1) * row for value, row in zip(of_column, rows, strict=True))
        columns.append(by_token.unflatten(0, (-1, part)).sum(1))
    grad = torch.stack(columns, dim=1).sum(0)
    if mean is None:
        return grad
    of_mean = [_total(value * mean[..., i] for i, value in enumerate(of_row)) for of_row in zip(*scaled, strict=True)]
    return grad - _sums(of_mean).unsqueeze(-1)


def _sums(values: list[torch.Tensor]) -> torch.Tensor:
    """The sum over all tokens of each, one by one: for a stack, Inductor would make another loop over tokens."""
    return torch.stack([value.sum() for value in values])


def _rows(streams: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Each stream `[B, S, D]`, in the dtype of computation."""
    return [row.to(dtype) for row in streams.unbind(-2)]


def _mixed(weights: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
    """Sum of rows `[B, S, D]` with weights `[B, S, N]` or `[N]`."""
    return _total(weights[..., i, None] * row for i, row in enumerate(rows))


def _total(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum, without the zero that Python's begins with."""
    return reduce(add, terms)


def _tile(rows: list[list[torch.Tensor]]) -> torch.Tensor:
    """`[B, S, N, N+2]` of values `[B, S]`."""
    return torch.stack([value for row in rows for value in row], dim=-1).unflatten(-1, (len(rows), -1))


def _own(values: torch.Tensor) -> torch.Tensor:
    """The values, in a buffer of their own when compiled: Inductor does not inline what has been given strides."""
    if not torch.compiler.is_dynamo_compiling():
        return values
    return values.as_strided(values.shape, values.stride())


KERNELS = steps_of(write, write_backward, read, read_backward)
