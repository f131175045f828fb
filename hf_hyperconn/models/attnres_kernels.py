# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The fused kernels of attention residuals (see `attention_residuals.py`).

Two kernels, one for a read and one for its backward. They accept the M values in two tensors, such as a layer's input
and the layer's own values. Rows of D a token that must come from memory, or go there:

    read             h, scores, and the softmax for the backward              reads M + 1, writes 1
    read backward    gradients of the values and of the query                 reads M + 1, writes M

A program holds rows of one token at a time, whole, in its registers. The read passes over the values once, and scales
its sum when it meets a larger score. Beside the sum it adds up the values themselves. At w = 0 both sums have equal
terms in equal order, so their difference is exactly 0. The backward passes over a token's values twice, the second
time through the cache. Each of its programs has a chunk of the tokens, to add up the gradient of the query without
atomics: equal inputs give equal bits. M, D and strides are arguments; the next power of two of D is compiled in.
Values are computed in float32, and results are rounded once.
"""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the fused kernels need Triton. Run: pip install triton") from error


@triton.jit
def _row(pointer, d, size):
    """Load a row `[D]`, float32, padded with zeros."""
    return tl.load(pointer + d, mask=d < size, other=0.0).to(tl.float32)


@triton.jit
def _store_row(pointer, row, d, size):
    tl.store(pointer + d, row.to(pointer.dtype.element_ty), mask=d < size)


@triton.jit
def _add_values(
    values, stride, count, query, d, size, eps, scores, deviations, largest, total, weighted, plain,
):  # fmt: skip
    """Go on with the softmax over values: the largest score, and sums of powers, of weighted and of plain values."""
    for i in range(0, count):
        value = _row(values + i * stride, d, size)
        deviation = tl.rsqrt(tl.sum(value * value) / size + eps)
        score = tl.sum(value * query) * deviation
        tl.store(scores + i, score)
        tl.store(deviations + i, deviation)
        larger = tl.maximum(largest, score)
        kept, power = tl.exp(largest - larger), tl.exp(score - larger)
        total = total * kept + power
        weighted = weighted * kept + power * value
        plain += value
        largest = larger
    return largest, total, weighted, plain


@triton.jit(do_not_specialize=["first_count", "last_count"])
def _read(
    query, residual, residual_stride,
    first, first_token_stride, first_stride, first_count, last, last_token_stride, last_stride, last_count,
    branch_input, scores, deviations, softmax, size, eps,
    ADDS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    count = first_count + last_count
    scores += token * count
    deviations += token * count
    w = _row(query, d, size)
    zeros, largest = tl.zeros((BLOCK,), tl.float32), tl.full((), float("-inf"), tl.float32)
    largest, total, weighted, plain = _add_values(
        first + token * first_token_stride, first_stride, first_count, w, d, size, eps, scores, deviations,
        largest, tl.zeros((), tl.float32), zeros, zeros,
    )  # fmt: skip
    largest, total, weighted, plain = _add_values(
        last + token * last_token_stride, last_stride, last_count, w, d, size, eps,
        scores + first_count, deviations + first_count, largest, total, weighted, plain,
    )  # fmt: skip
    # rounded to nearest: 1 for equal scores
    scale = tl.div_rn(count.to(tl.float32), total)
    tl.store(softmax + 2 * token, largest)
    tl.store(softmax + 2 * token + 1, scale)
    if ADDS_RESIDUAL:
        h = _row(residual + token * residual_stride, d, size) + (scale * weighted - plain)
    else:
        h = weighted / total
    _store_row(branch_input + token * size, h, d, size)


@triton.jit
def _mean_gradient(values, stride, count, grad, d, size, scores, largest, scale, mean):
    """Add to the gradients of weights M p, each times its weight."""
    for i in range(0, count):
        of_weight = tl.sum(_row(values + i * stride, d, size) * grad)
        mean += scale * tl.exp(tl.load(scores + i) - largest) * of_weight
    return mean


@triton.jit
def _values_backward(
    values, stride, count, grad, query, d, size, scores, deviations, largest, scale, mean, all_count,
    new_grad_values, of_query, ADDS_RESIDUAL: tl.constexpr,
):  # fmt: skip
    """Write the gradients of values, and add to the gradient of the query."""
    for i in range(0, count):
        value = _row(values + i * stride, d, size)
        score, deviation = tl.load(scores + i), tl.load(deviations + i)
        weight = scale * tl.exp(score - largest)
        by_query = weight * (tl.sum(value * grad) - mean) * deviation
        if ADDS_RESIDUAL:
            weight -= 1.0
        else:
            weight, by_query = weight / all_count, by_query / all_count
        by_value = by_query * score * deviation / size
        _store_row(new_grad_values + i * size, weight * grad + by_query * query - by_value * value, d, size)
        of_query += by_query * value
    return of_query


@triton.jit(do_not_specialize=["first_count", "last_count", "token_count", "tokens_a_chunk"])
def _read_backward(
    query, first, first_token_stride, first_stride, first_count, last, last_token_stride, last_stride, last_count,
    scores, deviations, softmax, grad, grad_stride, first_grad, last_grad, partial,
    token_count, tokens_a_chunk, size,
    ADDS_RESIDUAL: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    chunk, d = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    count = first_count + last_count
    all_count = count.to(tl.float32)
    w = _row(query, d, size)
    of_query = tl.zeros((BLOCK,), tl.float32)
    for token in range(chunk * tokens_a_chunk, tl.minimum((chunk + 1) * tokens_a_chunk, token_count)):
        of_read = _row(grad + token * grad_stride, d, size)
        largest, scale = tl.load(softmax + 2 * token), tl.load(softmax + 2 * token + 1)
        of_first, of_last = first + token * first_token_stride, last + token * last_token_stride
        place = token * count
        mean = _mean_gradient(
            of_first, first_stride, first_count, of_read, d, size, scores + place, largest, scale,
            tl.zeros((), tl.float32),
        )  # fmt: skip
        mean = _mean_gradient(
            of_last, last_stride, last_count, of_read, d, size, scores + place + first_count, largest, scale, mean
        )
        mean /= all_count
        of_query = _values_backward(
            of_first, first_stride, first_count, of_read, w, d, size, scores + place, deviations + place,
            largest, scale, mean, all_count, first_grad + token * first_count * size, of_query, ADDS_RESIDUAL,
        )  # fmt: skip
        place += first_count
        of_query = _values_backward(
            of_last, last_stride, last_count, of_read, w, d, size, scores + place, deviations + place,
            largest, scale, mean, all_count, last_grad + token * last_count * size, of_query, ADDS_RESIDUAL,
        )  # fmt: skip
    _store_row(partial + chunk * size, of_query, d, size)
