# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The fused kernels of mHC and iHC (see `manifold_hyper_connections.py`).

M is the number of rows of `fn`: N reads, N writes and, for mHC, N x N to mix. A width connection is three kernels, a
depth connection one, and so are their backwards but for a fourth, the gradient of `fn`:

    width     project          products of each stream with its part of `fn`        reads N rows of D a token
              coefficients     from them, with Sinkhorn                             nothing of size D
              read             the branch input                                     reads N, writes 1
    depth     write            the next streams                                     reads N + 1, writes N
    backward  write            gradients of branch output and writes                reads N + 1, writes 1
              dot              of reads and mix                                     reads 2N + 1
              coefficients     of the logits, Sinkhorn's iterates made again        nothing of size D
              read             of the streams                                       reads 2N + 1, writes N
              projection       of `fn`                                              reads N

The streams have one gradient. The backward of a depth connection hands on the gradient of the mixed streams, and the
backward of the width connection passes it through the mix. One program makes all sums of a token, and a second
reduction the sums over tokens, without atomics: equal inputs give equal bits. A token's results do not depend on the
number of tokens. Token count, D, strides and the number of Sinkhorn's iterations are arguments; N is compiled in.
Values and coefficients are float32, and results are rounded once.
"""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the fused kernels need Triton. Run: pip install triton") from error


@triton.jit
def _stream_values(pointer, tokens, stride, mask, N: tl.constexpr, N_PAD: tl.constexpr):
    """Load one value of each stream `[T, N]`, padded with zeros."""
    stream = tl.arange(0, N_PAD)[None, :]
    offsets = tokens.to(tl.int64)[:, None] * stride + stream
    return tl.load(pointer + offsets, mask=mask[:, None] & (stream < N), other=0.0).to(tl.float32)


@triton.jit
def _row(pointer, tokens, stride, d, mask, size):
    """Load a row of each token `[T, D]`, float32."""
    offsets = tokens.to(tl.int64)[:, None] * stride + d[None, :]
    return tl.load(pointer + offsets, mask=mask[:, None] & (d < size)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _rows(pointer, tokens, token_stride, stream_stride, d, mask, size, N: tl.constexpr, N_PAD: tl.constexpr):
    """Load the streams of each token `[T, N, D]`, float32, padded with zeros."""
    stream = tl.arange(0, N_PAD)[None, :, None]
    offsets = tokens.to(tl.int64)[:, None, None] * token_stride + stream * stream_stride + d[None, None, :]
    inside = mask[:, None, None] & (stream < N) & (d < size)[None, None, :]
    return tl.load(pointer + offsets, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def _store_rows(pointer, tile, tokens, d, mask, size, N: tl.constexpr, N_PAD: tl.constexpr):
    stream = tl.arange(0, N_PAD)[None, :, None]
    offsets = (tokens.to(tl.int64)[:, None, None] * N + stream) * size + d[None, None, :]
    inside = mask[:, None, None] & (stream < N) & (d < size)[None, None, :]
    tl.store(pointer + offsets, tile.to(pointer.dtype.element_ty), mask=inside)


@triton.jit
def _store_row(pointer, tile, tokens, d, mask, size):
    offsets = tokens.to(tl.int64)[:, None] * size + d[None, :]
    tl.store(pointer + offsets, tile.to(pointer.dtype.element_ty), mask=mask[:, None] & (d < size)[None, :])


@triton.jit
def _centred(streams, tokens, token_stride, stream_stride, d, mask, size, N: tl.constexpr, N_PAD: tl.constexpr):
    """Load streams `[T, N, D]`; return them, their mean `[T, D]`, exact for equal streams, and their deviations."""
    is_stream = tl.arange(0, N_PAD)[None, :, None] < N
    values = _rows(streams, tokens, token_stride, stream_stride, d, mask, size, N, N_PAD)
    first = _row(streams, tokens, token_stride, d, mask, size)
    mean = first + tl.sum(tl.where(is_stream, values - first[:, None, :], 0.0), axis=1) / N
    return values, mean, tl.where(is_stream, values - mean[:, None, :], 0.0)


@triton.jit(do_not_specialize=["token_count"])
def _project(
    streams, token_stride, stream_stride, fn, products, squares, token_count, size,
    N: tl.constexpr, M: tl.constexpr, M_PAD: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * T + tl.arange(0, T)
    stream = tl.program_id(1).to(tl.int64)
    mask = tokens < token_count
    row = tl.arange(0, M_PAD)
    total = tl.zeros((T, M_PAD), tl.float32)
    square = tl.zeros((T,), tl.float32)
    for start in range(0, size, BLOCK):
        d = start + tl.arange(0, BLOCK)
        h = _row(streams + stream * stream_stride, tokens, token_stride, d, mask, size)
        inside = (row < M)[:, None] & (d < size)[None, :]
        weights = tl.load(fn + (row[:, None] * N + stream) * size + d[None, :], mask=inside, other=0.0)
        total = tl.dot(h, tl.trans(weights), total, input_precision="ieee")
        square += tl.sum(h * h, axis=1)
    place = tokens.to(tl.int64) * N + stream
    tl.store(products + place[:, None] * M + row[None, :], total, mask=mask[:, None] & (row < M)[None, :])
    tl.store(squares + place, square, mask=mask)


@triton.jit
def _over_streams(products, inside, N: tl.constexpr, M: tl.constexpr):
    """Sum the results of `_project` over the streams."""
    total = tl.load(products, mask=inside, other=0.0)
    for i in tl.static_range(1, N):
        total += tl.load(products + i * M, mask=inside, other=0.0)
    return total


@triton.jit
def _softmax(logits, N: tl.constexpr, N_PAD: tl.constexpr):
    """Return the softmax of the rows of `[N, N, T]`, padded with zeros."""
    row, column = tl.arange(0, N_PAD)[:, None, None], tl.arange(0, N_PAD)[None, :, None]
    logits = tl.where(column < N, logits, float("-inf"))
    powers = tl.exp(logits - tl.max(logits, axis=1)[:, None, :])
    return tl.where((row < N) & (column < N), powers / tl.sum(powers, axis=1)[:, None, :], 0.0)


@triton.jit
def _divisor(matrix, eps, AXIS: tl.constexpr):
    """Return the divisor that normalizes the columns (axis 0) or rows (axis 1) of `[N, N, T]`; one in the padding."""
    sums = tl.sum(matrix, axis=AXIS)
    return tl.expand_dims(tl.where(sums > 0, sums + eps, 1.0), AXIS)


@triton.jit
def _sinkhorn(matrix, rounds, eps):
    """Normalize the columns; then, `rounds` times, rows and columns."""
    matrix = matrix / _divisor(matrix, eps, 0)
    for _ in range(0, rounds):
        matrix = matrix / _divisor(matrix, eps, 1)
        matrix = matrix / _divisor(matrix, eps, 0)
    return matrix


@triton.jit
def _normalized_backward(grad, matrix, eps, AXIS: tl.constexpr):
    """Return the gradient of `matrix` from the gradient of it with its columns or rows normalized."""
    divisor = _divisor(matrix, eps, AXIS)
    along = tl.expand_dims(tl.sum(grad * (matrix / divisor), axis=AXIS), AXIS)
    return tl.where(matrix > 0, (grad - along) / divisor, 0.0)


@triton.jit(do_not_specialize=["token_count", "iters"])
def _coefficients(
    products, squares, base, scale, read, write, mix, predicted, deviation, token_count, size, iters, eps,
    N: tl.constexpr, N_PAD: tl.constexpr, M: tl.constexpr, MIXES: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    tokens = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    mask = tokens < token_count
    factor = tl.rsqrt(_over_streams(squares + tokens * N, mask, N, 1) / size / N + eps)
    tl.store(deviation + tokens, factor, mask=mask)

    one = tl.arange(0, N_PAD)[:, None]
    inside = (one < N) & mask[None, :]
    for group in tl.static_range(2):
        rows = group * N + one
        prediction = _over_streams(products + tokens[None, :] * (N * M) + rows, inside, N, M) * factor[None, :]
        tl.store(predicted + tokens[None, :] * M + rows, prediction, mask=inside)
        logits = tl.load(scale + group) * prediction + tl.load(base + rows, mask=one < N, other=0.0)
        if group == 0:
            tl.store(read + tokens[None, :] * N + one, tl.sigmoid(logits) + eps, mask=inside)
        else:
            tl.store(write + tokens[None, :] * N + one, 2.0 * tl.sigmoid(logits), mask=inside)

    if MIXES:
        old, new = tl.arange(0, N_PAD)[:, None, None], tl.arange(0, N_PAD)[None, :, None]
        is_entry = (old < N) & (new < N)
        inside = is_entry & mask[None, None, :]
        rows = 2 * N + old * N + new
        prediction = _over_streams(products + tokens[None, None, :] * (N * M) + rows, inside, N, M)
        prediction *= factor[None, None, :]
        tl.store(predicted + tokens[None, None, :] * M + rows, prediction, mask=inside)
        logits = tl.load(scale + 2) * prediction + tl.load(base + rows, mask=is_entry, other=0.0)
        start = tl.where(is_entry, _softmax(logits, N, N_PAD) + eps, 0.0)
        matrix = _sinkhorn(start, iters - 1, eps)
        tl.store(mix + tokens[None, None, :] * (N * N) + new * N + old, matrix, mask=inside)


@triton.jit(do_not_specialize=["token_count"])
def _read(
    streams, token_stride, stream_stride, read, branch_input, token_count, size,
    N: tl.constexpr, N_PAD: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * T + tl.arange(0, T)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < token_count
    _, mean, deviations = _centred(streams, tokens, token_stride, stream_stride, d, mask, size, N, N_PAD)
    weights = _stream_values(read, tokens, N, mask, N, N_PAD)
    x = tl.sum(weights, axis=1)[:, None] * mean + tl.sum(weights[:, :, None] * deviations, axis=1)
    _store_row(branch_input, x, tokens, d, mask, size)


@triton.jit(do_not_specialize=["token_count"])
def _write(
    streams, token_stride, stream_stride, write, mix, output, output_stride, next_streams, token_count, size,
    N: tl.constexpr, N_PAD: tl.constexpr, MIXES: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * T + tl.arange(0, T)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < token_count
    new = tl.arange(0, N_PAD)[None, :]
    inside = mask[:, None] & (new < N)
    values, mean, _ = _centred(streams, tokens, token_stride, stream_stride, d, mask, size, N, N_PAD)
    if MIXES:
        values = tl.zeros((T, N_PAD, BLOCK), tl.float32)
        for i in tl.static_range(N):
            weights = tl.load(mix + tokens.to(tl.int64)[:, None] * (N * N) + new * N + i, mask=inside, other=0.0)
            row = _row(streams + i * stream_stride, tokens, token_stride, d, mask, size)
            values += weights[:, :, None] * (row - mean)[:, None, :]
        values += mean[:, None, :]
    weights = _stream_values(write, tokens, N, mask, N, N_PAD)
    values += weights[:, :, None] * _row(output, tokens, output_stride, d, mask, size)[:, None, :]
    _store_rows(next_streams, values, tokens, d, mask, size, N, N_PAD)


@triton.jit(do_not_specialize=["token_count"])
def _write_backward(
    grad, token_stride, stream_stride, write, output, output_stride, grad_write, grad_output, token_count, size,
    N: tl.constexpr, N_PAD: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * T + tl.arange(0, T)
    mask = tokens < token_count
    weights = _stream_values(write, tokens, N, mask, N, N_PAD)
    of_write = tl.zeros((T, N_PAD), tl.float32)
    for start in range(0, size, BLOCK):
        d = start + tl.arange(0, BLOCK)
        of_streams = _rows(grad, tokens, token_stride, stream_stride, d, mask, size, N, N_PAD)
        row = _row(output, tokens, output_stride, d, mask, size)
        of_write += tl.sum(of_streams * row[:, None, :], axis=2)
        _store_row(grad_output, tl.sum(weights[:, :, None] * of_streams, axis=1), tokens, d, mask, size)
    stream = tl.arange(0, N_PAD)[None, :]
    tl.store(grad_write + tokens.to(tl.int64)[:, None] * N + stream, of_write, mask=mask[:, None] & (stream < N))


@triton.jit(do_not_specialize=["token_count"])
def _dot_backward(
    streams, token_stride, stream_stride, grad_streams, grad_token_stride, grad_stream_stride,
    grad_input, grad_input_stride, grad_read, grad_mix, token_count, size,
    N: tl.constexpr, N_PAD: tl.constexpr, MIXES: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * T + tl.arange(0, T)
    mask = tokens < token_count
    column = tl.arange(0, N_PAD)[None, None, :]
    of_read = tl.zeros((T, N_PAD), tl.float32)
    of_mix = tl.zeros((T, N_PAD, N_PAD), tl.float32)
    for start in range(0, size, BLOCK):
        d = start + tl.arange(0, BLOCK)
        of_input = _row(grad_input, tokens, grad_input_stride, d, mask, size)
        values, _, deviations = _centred(streams, tokens, token_stride, stream_stride, d, mask, size, N, N_PAD)
        of_read += tl.sum(values * of_input[:, None, :], axis=2)
        if MIXES:
            for j in tl.static_range(N):
                row = _row(grad_streams + j * grad_stream_stride, tokens, grad_token_stride, d, mask, size)
                of_mix += tl.where(column == j, tl.sum(deviations * row[:, None, :], axis=2)[:, :, None], 0.0)
    token, stream = tokens.to(tl.int64), tl.arange(0, N_PAD)
    tl.store(grad_read + token[:, None] * N + stream[None, :], of_read, mask=mask[:, None] & (stream < N)[None, :])
    if MIXES:
        entries = stream[None, :, None] * N + column
        inside = mask[:, None, None] & (stream < N)[None, :, None] & (column < N)
        tl.store(grad_mix + token[:, None, None] * (N * N) + entries, of_mix, mask=inside)


@triton.jit(do_not_specialize=["token_count", "iters"])
def _coefficients_backward(
    predicted, deviation, base, scale, grad_read, grad_write, grad_mix, of_parameters, of_products, of_values,
    token_count, size, iters, eps,
    N: tl.constexpr, N_PAD: tl.constexpr, M: tl.constexpr, MIXES: tl.constexpr, T: tl.constexpr,
):  # fmt: skip
    tokens = (tl.program_id(0) * T + tl.arange(0, T)).to(tl.int64)
    mask = tokens < token_count
    factor = tl.load(deviation + tokens, mask=mask, other=0.0)
    along = tl.zeros((T,), tl.float32)
    of_parameters += tokens * (M + (3 if MIXES else 2))  # a row of M logits and of the scales

    one = tl.arange(0, N_PAD)[:, None]
    inside = (one < N) & mask[None, :]
    for group in tl.static_range(2):
        place = tokens[None, :] * M + group * N + one
        prediction = tl.load(predicted + place, mask=inside, other=0.0)
        gate = tl.sigmoid(
            tl.load(scale + group) * prediction + tl.load(base + group * N + one, mask=one < N, other=0.0)
        )
        if group == 0:
            grad = tl.load(grad_read + tokens[None, :] * N + one, mask=inside, other=0.0)
        else:
            grad = 2.0 * tl.load(grad_write + tokens[None, :] * N + one, mask=inside, other=0.0)
        grad *= gate * (1.0 - gate)
        of_prediction = tl.load(scale + group) * grad
        along += tl.sum(of_prediction * prediction, axis=0)
        tl.store(of_parameters[None, :] + group * N + one, grad, mask=inside)
        tl.store(of_parameters + M + group, tl.sum(grad * prediction, axis=0), mask=mask)
        tl.store(of_products + place, of_prediction * factor[None, :], mask=inside)

    if MIXES:
        old, new = tl.arange(0, N_PAD)[:, None, None], tl.arange(0, N_PAD)[None, :, None]
        is_entry = (old < N) & (new < N)
        inside = is_entry & mask[None, None, :]
        place = tokens[None, None, :] * M + 2 * N + old * N + new
        prediction = tl.load(predicted + place, mask=inside, other=0.0)
        logits = tl.load(scale + 2) * prediction
        logits += tl.load(base + 2 * N + old * N + new, mask=is_entry, other=0.0)
        softmax = _softmax(logits, N, N_PAD)
        start = tl.where(is_entry, softmax + eps, 0.0)
        grad = tl.load(grad_mix + tokens[None, None, :] * (N * N) + old * N + new, mask=inside, other=0.0)
        for k in range(0, iters - 1):
            before = _sinkhorn(start, iters - 2 - k, eps)
            grad = _normalized_backward(grad, before / _divisor(before, eps, 1), eps, 0)
            grad = _normalized_backward(grad, before, eps, 1)
        grad = _normalized_backward(grad, start, eps, 0)
        grad = softmax * (grad - tl.sum(grad * softmax, axis=1)[:, None, :])
        of_prediction = tl.load(scale + 2) * grad
        along += tl.sum(tl.sum(of_prediction * prediction, axis=0), axis=0)
        tl.store(of_parameters[None, None, :] + 2 * N + old * N + new, grad, mask=inside)
        tl.store(of_parameters + M + 2, tl.sum(tl.sum(grad * prediction, axis=0), axis=0), mask=mask)
        tl.store(of_products + place, of_prediction * factor[None, None, :], mask=inside)

    tl.store(of_values + tokens, -factor * factor * along / size / N, mask=mask)


@triton.jit(do_not_specialize=["token_count"])
def _read_backward(
    streams, token_stride, stream_stride, fn, read, mix, of_products, of_values,
    grad_streams, grad_token_stride, grad_stream_stride, grad_input, grad_input_stride, new_grad_streams,
    token_count, size,
    N: tl.constexpr, N_PAD: tl.constexpr, M: tl.constexpr, MIXES: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * T + tl.arange(0, T)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = tokens < token_count
    token, stream = tokens.to(tl.int64), tl.arange(0, N_PAD)
    weights = _stream_values(read, tokens, N, mask, N, N_PAD)
    grad = weights[:, :, None] * _row(grad_input, tokens, grad_input_stride, d, mask, size)[:, None, :]
    if MIXES:
        for j in tl.static_range(N):
            weights = _stream_values(mix + j * N, tokens, N * N, mask, N, N_PAD)
            # the rows of the mix do not sum to 1 exactly, so the mean has a gradient
            weights += ((1.0 - tl.sum(weights, axis=1)) / N)[:, None]
            row = _row(grad_streams + j * grad_stream_stride, tokens, grad_token_stride, d, mask, size)
            grad += weights[:, :, None] * row[:, None, :]
    else:
        grad += _rows(grad_streams, tokens, grad_token_stride, grad_stream_stride, d, mask, size, N, N_PAD)
    h = _rows(streams, tokens, token_stride, stream_stride, d, mask, size, N, N_PAD)
    grad += tl.load(of_values + token, mask=mask, other=0.0)[:, None, None] * h
    inside = (stream < N)[:, None] & (d < size)[None, :]
    for m in range(0, M):
        fn_rows = tl.load(fn + (m * N + stream[:, None]) * size + d[None, :], mask=inside, other=0.0)
        grad += tl.load(of_products + token * M + m, mask=mask, other=0.0)[:, None, None] * fn_rows[None, :, :]
    _store_rows(new_grad_streams, grad, tokens, d, mask, size, N, N_PAD)


@triton.jit(do_not_specialize=["token_count", "tokens_a_chunk"])
def _projection_backward(
    streams, token_stride, stream_stride, of_products, partial, token_count, tokens_a_chunk, size,
    N: tl.constexpr, M: tl.constexpr, M_PAD: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    stream, chunk = tl.program_id(1).to(tl.int64), tl.program_id(2).to(tl.int64)
    row = tl.arange(0, M_PAD)
    end = tl.minimum((chunk + 1) * tokens_a_chunk, token_count)
    total = tl.zeros((M_PAD, BLOCK), tl.float32)
    for start in range(0, tokens_a_chunk, T):
        for t in tl.static_range(T):
            token = chunk * tokens_a_chunk + start + t
            # nothing behind the last token
            weights = tl.load(of_products + token * M + row, mask=row < tl.where(token < end, M, 0), other=0.0)
            place = token * token_stride + stream * stream_stride + d
            values = tl.load(streams + place, mask=d < tl.where(token < end, size, 0), other=0.0).to(tl.float32)
            total += weights[:, None] * values[None, :]
    offsets = ((chunk * M + row[:, None]) * N + stream) * size + d[None, :]
    tl.store(partial + offsets, total, mask=(row < M)[:, None] & (d < size)[None, :])
