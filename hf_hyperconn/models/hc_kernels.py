# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The fused kernels of a step (see `hc_step.py`), in Triton.

Four kernels, the first three for steps that write, read or do both:

    forward     H from S and f, or S itself; its coefficients; x           reads N + 1 rows of D a token, writes N + 1
    backward    gradients of S, f and of every coefficient, H made again   reads 2N + 2, writes N + 1
    parameters  their gradients, over a chunk of tokens, H made again      reads N + 1
    total       the gradients of parameters, over all chunks               nothing of a token

In forward and backward a program has one token, whose streams lie in its registers whole: each row is read once. The
threads lie side by side along D, so that sums over the streams stay within a thread. Coefficients come column by
column, `[N]`: a column for x, one for each new stream, one for the branch's output. In the other two a program has a
part of D. One program makes all sums of a token, and a second reduction the sums over tokens, without atomics: equal
inputs give equal bits. D and strides are arguments; N and the next power of two of D are compiled in. Values and
coefficients are float32, and results are rounded once. H is summed by `tl.fma`, whether or not other operations are
fused, so every kernel makes the same.

A read leaves one row of values a token for the steps after it: A `[N, N+1]`. When dynamic, the row also has norm(H) @
fn `[N, N+2]`, the norm's 1 / sqrt(...) `[N]` and, for a norm that centers, its mean `[N]`. Static coefficients are one
row for all tokens. b has a tensor of its own, `[N]` a token. The gradients of a token's coefficients are a row, too:
for A `[N, N+1]` and b `[N]`. When dynamic, the row also has gradients for the two scales and norm(H) @ fn `[N, N+2]`.
"""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the fused kernels need Triton. Run: pip install triton") from error

from .connection import OVERFLOW as _OVERFLOW

OVERFLOW = tl.constexpr(_OVERFLOW)


@triton.jit
def _values(pointer, stream, N: tl.constexpr, stride: tl.constexpr = 1):
    """Load one value of each stream `[N]`, padded with zeros."""
    return tl.load(pointer + stream * stride, mask=stream < N, other=0.0)


@triton.jit
def _store_values(pointer, values, stream, N: tl.constexpr, stride: tl.constexpr = 1):
    tl.store(pointer + stream * stride, values, mask=stream < N)


@triton.jit
def _row(pointer, d, size):
    """Load a row `[1, D]`, float32, padded with zeros."""
    return tl.load(pointer + d, mask=d < size, other=0.0).to(tl.float32)


@triton.jit
def _output(pointer, d, size, rounding):
    """Load a branch's output `[1, D]`, float32, clamped as by `clamp_infinities` for the dtype of `rounding`."""
    row = _row(pointer, d, size)
    if rounding.dtype.element_ty == tl.float16:
        row = tl.where(tl.abs(row) == float("inf"), tl.where(row > 0, OVERFLOW, -OVERFLOW), row)
    return row


@triton.jit
def _store_row(pointer, row, d, size):
    tl.store(pointer + d, row.to(pointer.dtype.element_ty), mask=d < size)


@triton.jit
def _rows(pointer, stride, stream, d, size, N: tl.constexpr):
    """Load the streams of a token `[N, D]`, float32, padded with zeros."""
    inside = (stream < N)[:, None] & (d < size)
    return tl.load(pointer + stream[:, None] * stride + d, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(pointer, rows, stream, d, size, N: tl.constexpr):
    inside = (stream < N)[:, None] & (d < size)
    tl.store(pointer + stream[:, None] * size + d, rows.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _streams(
    streams, token_stride, stream_stride, written, written_stride, beta, output, output_stride, rounding,
    token, stream, d, size, N: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """Return H `[N, D]` of a token, float32: the streams, or the written streams, rounded as when stored."""
    streams += token * token_stride
    if WRITES:
        written += token * written_stride
        weights = _values(beta + token * N, stream, N)
        values = weights[:, None] * _output(output + token * output_stride, d, size, rounding)
        for i in tl.static_range(N):
            weights = _values(written + i * (N + 1) + 1, stream, N)
            values = tl.fma(weights[:, None], _row(streams + i * stream_stride, d, size), values)
        return values.to(rounding.dtype.element_ty).to(tl.float32)
    return _rows(streams, stream_stride, stream, d, size, N)


@triton.jit
def _squash(predicted, offset, OFFSET: tl.constexpr, TANH: tl.constexpr):
    """Return tanh(prediction + offset) of a column."""
    logits = predicted
    if OFFSET:
        logits += tl.load(offset)
    if TANH:
        return 2.0 * tl.sigmoid(2.0 * logits) - 1.0
    return logits


@triton.jit
def _forward(
    streams, token_stride, stream_stride, written, written_stride, beta, output, output_stride,
    static_alpha, static_beta, fn, offset, alpha_scale, beta_scale,
    next_streams, branch_input, values, values_stride, next_beta,
    size, eps,
    N: tl.constexpr, N_PAD: tl.constexpr, BLOCK: tl.constexpr,
    WRITES: tl.constexpr, READS: tl.constexpr, DYNAMIC: tl.constexpr,
    OFFSET: tl.constexpr, CENTRED: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    stream, d = tl.arange(0, N_PAD), tl.arange(0, BLOCK)[None, :]
    h = _streams(
        streams, token_stride, stream_stride, written, written_stride, beta, output, output_stride, next_streams,
        token, stream, d, size, N, WRITES,
    )  # fmt: skip
    if WRITES:
        _store_rows(next_streams + token * N * size, h, stream, d, size, N)
    if READS:
        values += token * values_stride
    if DYNAMIC:
        centred = h
        if CENTRED:
            # before anything else is summed: sums of a large mean would cancel
            centre = tl.sum(h, axis=1) / size
            centred = tl.where(d < size, h - centre[:, None], 0.0)
            _store_values(values + N * (2 * N + 4), centre, stream, N)
        factor = tl.rsqrt(tl.sum(centred * centred, axis=1) / size + eps)
        _store_values(values + N * (2 * N + 3), factor, stream, N)
    if READS:
        for c in tl.static_range(N + 2):
            used = _values(static_beta if c > N else static_alpha + c, stream, N, 1 if c > N else N + 1)
            if DYNAMIC:
                prediction = tl.sum(centred * _row(fn + c * size, d, size), axis=1) * factor
                scale = tl.load(beta_scale if c > N else alpha_scale)
                used += scale * _squash(prediction, offset + c if OFFSET else offset, OFFSET, TANH)
                _store_values(values + N * (N + 1) + c, prediction, stream, N, N + 2)
            if c > N:
                _store_values(next_beta + token * N, used, stream, N)
            elif DYNAMIC or token == 0:
                _store_values(values + c, used, stream, N, N + 1)
            if c == 0:
                _store_row(branch_input + token * size, tl.sum(used[:, None] * h, axis=0, keep_dims=True), d, size)


@triton.jit
def _backward(
    streams, token_stride, stream_stride, written, written_stride, beta, output, output_stride, rounding,
    fn, offset, alpha_scale, beta_scale, values, values_stride,
    grad_streams, grad_token_stride, grad_stream_stride, grad_input, grad_input_stride, grad_beta,
    new_grad_streams, grads, grad_written_beta, grad_output,
    size,
    N: tl.constexpr, N_PAD: tl.constexpr, BLOCK: tl.constexpr,
    WRITES: tl.constexpr, READS: tl.constexpr, DYNAMIC: tl.constexpr,
    OFFSET: tl.constexpr, CENTRED: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    stream, d = tl.arange(0, N_PAD), tl.arange(0, BLOCK)[None, :]
    grad_streams += token * grad_token_stride
    if READS:
        h = _streams(
            streams, token_stride, stream_stride, written, written_stride, beta, output, output_stride, rounding,
            token, stream, d, size, N, WRITES,
        )  # fmt: skip
        grad = tl.zeros((N_PAD, BLOCK), tl.float32)
        values += token * values_stride
        if DYNAMIC:
            grads += token * (2 * N * (N + 2) + 2)
            factor = _values(values + N * (2 * N + 3), stream, N)
            by_value, by_constant = tl.zeros((N_PAD,), tl.float32), tl.zeros((N_PAD,), tl.float32)
            of_alpha_scale = tl.zeros((N_PAD,), tl.float32)
        else:
            grads += token * (N * (N + 2))
        for c in tl.static_range(N + 2):
            if c <= N:
                of_input = grad_input + token * grad_input_stride
                row = _row(of_input if c == 0 else grad_streams + (c - 1) * grad_stream_stride, d, size)
                used = _values(values + c, stream, N, N + 1)
                of_used = tl.sum(h * row, axis=1)
                grad += used[:, None] * row
                _store_values(grads + c, of_used, stream, N, N + 1)
            else:
                of_used = _values(grad_beta + token * N, stream, N)
                _store_values(grads + N * (N + 1), of_used, stream, N)
            if DYNAMIC:
                prediction = _values(values + N * (N + 1) + c, stream, N, N + 2)
                squashed = _squash(prediction, offset + c if OFFSET else offset, OFFSET, TANH)
                if c <= N:
                    of_alpha_scale += of_used * squashed
                else:
                    tl.store(grads + N * (N + 2) + 1, tl.sum(tl.where(stream < N, of_used * squashed, 0.0)))
                of_predicted = of_used * tl.load(beta_scale if c > N else alpha_scale)
                if TANH:
                    of_predicted *= 1.0 - squashed * squashed
                _store_values(grads + N * (N + 2) + 2 + c, of_predicted, stream, N, N + 2)
                fn_row = _row(fn + c * size, d, size)
                grad += (of_predicted * factor)[:, None] * fn_row
                by_value -= factor * factor * of_predicted * prediction / size
                if CENTRED:
                    by_constant -= factor * of_predicted * tl.sum(fn_row) / size
        if DYNAMIC:
            tl.store(grads + N * (N + 2), tl.sum(tl.where(stream < N, of_alpha_scale, 0.0)))
            if CENTRED:
                h -= _values(values + N * (2 * N + 4), stream, N)[:, None]
            # beyond D the gradient is by_constant, and must not be summed
            grad = tl.where(d < size, grad + by_value[:, None] * h + by_constant[:, None], 0.0)
        _store_rows(new_grad_streams + token * N * size, grad, stream, d, size, N)
    else:
        grad = _rows(grad_streams, grad_stream_stride, stream, d, size, N)
    if WRITES:
        weights = _values(beta + token * N, stream, N)
        branch_output = _output(output + token * output_stride, d, size, rounding)
        _store_values(grad_written_beta + token * N, tl.sum(grad * branch_output, axis=1), stream, N)
        _store_row(grad_output + token * size, tl.sum(weights[:, None] * grad, axis=0, keep_dims=True), d, size)


@triton.jit(do_not_specialize=["token_count", "tokens_a_chunk"])
def _parameters(
    streams, token_stride, stream_stride, written, written_stride, beta, output, output_stride, rounding,
    values, values_stride, grads, of_fn, of_others,
    token_count, tokens_a_chunk, size,
    N: tl.constexpr, N_PAD: tl.constexpr, M_PAD: tl.constexpr, R_PAD: tl.constexpr, T: tl.constexpr,
    BLOCK: tl.constexpr, WRITES: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    stream, d = tl.arange(0, N_PAD), (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    chunk, column = tl.program_id(1).to(tl.int64), tl.arange(0, M_PAD)
    row_size = 2 * N * (N + 2) + 2
    inside = (column < N + 2)[:, None] & (stream < N)[None, :]
    total = tl.zeros((M_PAD, BLOCK), tl.float32)
    first = chunk * tokens_a_chunk
    end = tl.minimum(first + tokens_a_chunk, token_count)
    for token in range(first, end):
        h = _streams(
            streams, token_stride, stream_stride, written, written_stride, beta, output, output_stride, rounding,
            token, stream, d, size, N, WRITES,
        )  # fmt: skip
        row = values + token * values_stride
        if CENTRED:
            h -= _values(row + N * (2 * N + 4), stream, N)[:, None]
        factor = _values(row + N * (2 * N + 3), stream, N)
        place = token * row_size + N * (N + 2) + 2 + stream[None, :] * (N + 2) + column[:, None]
        weights = tl.load(grads + place, mask=inside, other=0.0) * factor[None, :]
        total += tl.sum(weights[:, :, None] * h[None, :, :], axis=1)
    places = (chunk * (N + 2) + column[:, None]) * size + d
    tl.store(of_fn + places, total, mask=(column < N + 2)[:, None] & (d < size))
    if tl.program_id(0) == 0:
        place, part = tl.arange(0, R_PAD), tl.arange(0, T)
        others = tl.zeros((R_PAD,), tl.float32)
        for start in range(first, end, T):
            tokens = (start + part)[:, None]
            is_value = (tokens < end) & (place < row_size)[None, :]
            others += tl.sum(tl.load(grads + tokens * row_size + place[None, :], mask=is_value, other=0.0), axis=0)
        tl.store(of_others + chunk * row_size + place, others, mask=place < row_size)


@triton.jit
def _fn_rows(alpha_fn, beta_fn, column, d, size, N: tl.constexpr):
    """Load rows of `fn` `[M, D]` without the norm's weight, from its parts, padded with zeros."""
    of_alpha = tl.load(alpha_fn + d * (N + 1) + column, mask=(column <= N) & (d < size), other=0.0)
    return of_alpha + tl.load(beta_fn + d + 0 * column, mask=(column == N + 1) & (d < size), other=0.0)


@triton.jit(do_not_specialize=["chunks"])
def _total(
    of_fn, of_others, alpha_fn, beta_fn, weight, bias,
    grad_static, grad_alpha_fn, grad_beta_fn, grad_weight, grad_bias,
    chunks, size,
    N: tl.constexpr, N_PAD: tl.constexpr, M_PAD: tl.constexpr, R_PAD: tl.constexpr, CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr, WEIGHT: tl.constexpr, OFFSET: tl.constexpr,
):  # fmt: skip
    column, d = tl.arange(0, M_PAD)[:, None], (tl.program_id(0) * BLOCK + tl.arange(0, BLOCK))[None, :]
    row_size, summed = 2 * N * (N + 2) + 2, N * (N + 2) + 2
    is_row = (column < N + 2) & (d < size)
    total = tl.zeros((M_PAD, BLOCK), tl.float32)
    for start in range(0, chunks, CHUNKS):
        chunk = (start + tl.arange(0, CHUNKS)).to(tl.int64)[:, None, None]
        places = (chunk * (N + 2) + column[None, :, :]) * size + d[None, :, :]
        total += tl.sum(tl.load(of_fn + places, mask=(chunk < chunks) & is_row[None, :, :], other=0.0), axis=0)
    grad = total
    if WEIGHT:
        grad *= _row(weight, d, size)
        rows = _fn_rows(alpha_fn, beta_fn, column, d, size, N)
        _store_row(grad_weight, tl.sum(total * rows, axis=0, keep_dims=True), d, size)
    if OFFSET:
        of_offset = tl.zeros((M_PAD, N_PAD), tl.float32)
        stream = tl.arange(0, N_PAD)[None, None, :]
        for start in range(0, chunks, CHUNKS):
            chunk = (start + tl.arange(0, CHUNKS)).to(tl.int64)[:, None, None]
            places = chunk * row_size + summed + stream * (N + 2) + column[None, :, :]
            inside = (chunk < chunks) & (column < N + 2)[None, :, :] & (stream < N)
            of_offset += tl.sum(tl.load(of_others + places, mask=inside, other=0.0), axis=0)
        of_offset = tl.sum(of_offset, axis=1)[:, None]
        grad += of_offset * _row(bias, d, size)
        rows = _fn_rows(alpha_fn, beta_fn, column, d, size, N)
        _store_row(grad_bias, tl.sum(of_offset * rows, axis=0, keep_dims=True), d, size)
    tl.store(grad_alpha_fn + d * (N + 1) + column, grad, mask=(column <= N) & (d < size))
    tl.store(grad_beta_fn + d + 0 * column, grad, mask=(column == N + 1) & (d < size))
    if tl.program_id(0) == 0:
        place = tl.arange(0, R_PAD)
        others = tl.zeros((R_PAD,), tl.float32)
        for start in range(0, chunks, CHUNKS):
            chunk = (start + tl.arange(0, CHUNKS)).to(tl.int64)[:, None]
            inside = (chunk < chunks) & (place < summed)[None, :]
            others += tl.sum(tl.load(of_others + chunk * row_size + place[None, :], mask=inside, other=0.0), axis=0)
        tl.store(grad_static + place, others, mask=place < summed)
