# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Steps (see `hyper_connections_step.py`) as sums written out over streams and coefficients, for a compiler to fuse.

No setting of matrix products can make them lossy. A step works on *rows*, one `[B, S, D]` a stream, and on *values*,
one `[B, S, 1]` a coefficient. For Inductor these are loops over tokens and D, and over tokens, which it turns into one
loop over tokens: the row that one sum over D has read is still in the cache when the next needs it. Three things would
end that loop. A `torch.cat` that is read again: so rows and values are joined for what a step returns, never for what
it goes on with. A loop of another shape: so of the tiles `[B, S, N, N+2]` only those that nothing waits for are made.
And a loop vectorised over tokens: values that lie side by side, as `torch.cat` places its operands, prevent it.
"""

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import add

import torch

from .hyper_connections_torch import Read, Reader, ReaderGrads, steps_of

# tokens whose part of the projection's gradient is summed before the parts are
PART = 16


def write(
    rows: Sequence[torch.Tensor], coefficients: torch.Tensor, branch_output: torch.Tensor
) -> Sequence[torch.Tensor]:
    """H = A_r^T S + b (outer) f, as rows."""
    dtype = torch.promote_types(rows[0].dtype, branch_output.dtype)
    *rows, output = _cast((*rows, branch_output), coefficients.dtype)
    _, *mix, beta = zip(*_values(coefficients), strict=True)
    return [(_mixed(column, rows) + value * output).to(dtype) for column, value in zip(mix, beta, strict=True)]


def write_backward(
    grads: Sequence[torch.Tensor], coefficients: torch.Tensor, branch_output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the gradient of H, those of b `[B, S, N]` and of f `[B, S, D]`."""
    *grads, output = _cast((*grads, branch_output), coefficients.dtype)
    *_, beta = zip(*_values(coefficients), strict=True)
    grad_beta = _side_by_side([_dot(grad, output) for grad in grads])
    return grad_beta, _mixed(beta, grads).to(branch_output.dtype)


def read(rows: Sequence[torch.Tensor], reader: Reader) -> Read:
    """The branch input x = A_m^T H, and the coefficients."""
    dtype, rows = rows[0].dtype, _cast(rows, reader.static_alpha.dtype)
    if reader.fn is None:
        return Read(_mixed(reader.static_alpha[:, 0], rows).to(dtype), reader.static)
    fn = _own(reader.fn)
    mean, centred = None, rows
    if reader.centred:
        means = [_own(row.mean(-1, keepdim=True)) for row in rows]
        mean, centred = torch.cat(means, dim=-1), [row - mean for row, mean in zip(rows, means, strict=True)]
    products = [[_dot(row, of_column) for of_column in fn.unbind(0)] for row in centred]
    deviations = [torch.rsqrt(_dot(row, row) / row.shape[-1] + reader.eps) for row in centred]
    deviation = torch.cat(deviations, dim=-1)
    predicted = _tile(products) * deviation.unsqueeze(-1)
    coefficients = reader.static + reader.scale * reader.squash(predicted)
    # A_m once more, from values: x need not wait for the tile
    weights = []
    for i, static in enumerate(reader.static_alpha[:, 0]):
        logit = products[i][0] * deviations[i]
        if reader.offset is not None:
            logit = logit + reader.offset[0]
        weights.append(_own(static + reader.alpha_scale * (logit.tanh() if reader.tanh else logit)))
    return Read(_mixed(weights, rows).to(dtype), coefficients, predicted, deviation, mean)


def read_backward(
    rows: Sequence[torch.Tensor],
    reader: Reader,
    result: Read,
    grad_mixed: Sequence[torch.Tensor],
    grad_input: torch.Tensor,
    grad_beta: torch.Tensor | None,
    wants_fn: bool,
) -> tuple[Sequence[torch.Tensor], ReaderGrads]:
    """From the gradients of A_r^T H, of x and of b, those of H, as rows, and of the reader."""
    size, dtype = rows[0].shape[-1], rows[0].dtype
    rows = _cast(rows, result.coefficients.dtype)
    used = _cast((grad_input, *grad_mixed), result.coefficients.dtype)
    terms = [_mixed(of_row[:-1], used) for of_row in _values(result.coefficients)]
    of_used = [[_dot(row, grad) for grad in used] for row in rows]
    tile = _tile(of_used)
    if reader.fn is None:
        return _cast(terms, dtype), ReaderGrads(_over_tokens(torch.nn.functional.pad(tile, (0, 1))))

    tile = torch.cat([tile, grad_beta.unsqueeze(-1)], dim=-1)
    for of_row, of_beta in zip(of_used, grad_beta.split(1, dim=-1), strict=True):
        of_row.append(of_beta)
    # what the gradient of a coefficient is multiplied with, for that of <h_i, fn_c> and, through the norm, of h_i
    squashed = reader.squash(result.predicted)
    slope = reader.scale * (1 - squashed * squashed) if reader.tanh else reader.scale.expand_as(squashed)
    of_product = _own(slope * result.deviation.unsqueeze(-1))
    of_norm = _own(slope * result.predicted * (result.deviation * result.deviation).unsqueeze(-1) / size)
    scaled = [_products(*of_row) for of_row in zip(of_used, _values(of_product), strict=True)]
    by_value = [_own(_total(_products(*of_row))) for of_row in zip(of_used, _values(of_norm), strict=True)]
    fn = _own(reader.fn)
    if reader.centred:
        rows = [row - result.mean[..., i, None] for i, row in enumerate(rows)]
    grads = []
    for i, row in enumerate(rows):
        grad = terms[i] + _mixed(scaled[i], fn.unbind(0)) - by_value[i] * row
        if reader.centred:
            grad = grad - _own(_mixed(scaled[i], fn.sum(-1).unbind(0)) / size)
        grads.append(grad.to(dtype))
    of_fn = _projection_backward(rows, scaled) if wants_fn else None
    of_offset = None if reader.offset is None else _over_tokens(tile * slope).sum(0)
    of_scale = _over_tokens(tile * squashed).sum(0)
    return grads, ReaderGrads(_over_tokens(tile), of_fn, of_offset, of_scale)


def _projection_backward(rows: Sequence[torch.Tensor], scaled: list[list[torch.Tensor]]) -> torch.Tensor:
    """The gradient of `fn`, `[N+2, D]`, from those of <h_i, fn_c>."""
    part = PART if rows[0].shape[:-1].numel() % PART == 0 else 1
    columns = []
    for of_column in zip(*scaled, strict=True):
        by_token = _mixed(of_column, rows).flatten(0, -2)
        columns.append(by_token.unflatten(0, (-1, part)).sum(1))
    return torch.stack(columns, dim=1).sum(0)


def _side_by_side(values: Sequence[torch.Tensor]) -> torch.Tensor:
    """`[B, S, N]` of values that the step before may read in the same loop, as it may not what `torch.cat` makes."""
    places = torch.arange(len(values), device=values[0].device)
    return reduce(lambda joined, i: torch.where(places == i, values[i], joined), range(1, len(values)), values[0])


def _streams(rows: Sequence[torch.Tensor]) -> torch.Tensor:
    """`[B, S, N, D]` of rows."""
    return torch.cat(rows, dim=-1).unflatten(-1, (len(rows), -1))


def _tile(values: list[list[torch.Tensor]]) -> torch.Tensor:
    """`[B, S, N, ...]` of values."""
    return torch.cat([value for of_row in values for value in of_row], dim=-1).unflatten(-1, (len(values), -1))


def _values(tile: torch.Tensor) -> list[Sequence[torch.Tensor]]:
    """The values of each stream in a tile; `[1]` each when the coefficients are static."""
    return [of_row.split(1, dim=-1) for of_row in tile.unbind(-2)]


def _cast(rows: Iterable[torch.Tensor], dtype: torch.dtype) -> list[torch.Tensor]:
    return [row.to(dtype) for row in rows]


def _dot(row: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """A value."""
    return (row * other).sum(-1, keepdim=True)


def _mixed(weights: Iterable[torch.Tensor], rows: Iterable[torch.Tensor]) -> torch.Tensor:
    """The weighted sum of rows."""
    return _total(_products(weights, rows))


def _products(left: Iterable[torch.Tensor], right: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [a * b for a, b in zip(left, right, strict=True)]


def _total(terms: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum, without the zero that Python's begins with."""
    return reduce(add, terms)


def _over_tokens(tile: torch.Tensor) -> torch.Tensor:
    return tile.flatten(0, -3).sum(0)


def _own(values: torch.Tensor) -> torch.Tensor:
    """The values, in a buffer of their own when compiled: Inductor does not inline what has been given strides."""
    if not torch.compiler.is_dynamo_compiling():
        return values
    return values.as_strided(values.shape, values.stride())


KERNELS = steps_of(write, write_backward, read, read_backward, split=lambda streams: streams.unbind(-2), join=_streams)
