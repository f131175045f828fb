# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The fused kernels of a step (see `hyper_connections_step.py`), in Triton.

Three kernels, each for steps that write, read or do both:

    forward     H from S and f, or S itself; its coefficients; x           reads N + 1 rows of D a token, writes N + 1
    backward    gradients of S, f and of every coefficient, H made again   reads 2N + 2, writes N + 1
    projection  gradient of `fn`, H made again                             reads N + 1

A program holds a few tokens. The coefficients of a token need sums over D of all its streams, so forward and backward
pass over the streams twice; the second pass finds them in the cache. All sums of one token are made by one program and
sums over tokens by a second reduction, without atomics: equal inputs give equal bits. Token count, D and strides are
arguments, N is compiled in. Values and coefficients are float32, what is written is rounded once.
"""

try:
    import triton
    import triton.language as tl
except ImportError as error:
    raise ImportError("the fused kernels need Triton. Run: pip install triton") from error


@triton.jit
def _coefficient_tile(pointer, tokens, stride, mask, N: tl.constexpr, N_PAD: tl.constexpr, M_PAD: tl.constexpr):
    """Coefficients `[T, N, N+2]` of tokens, padded with zeros."""
    stream, column = tl.arange(0, N_PAD)[None, :, None], tl.arange(0, M_PAD)[None, None, :]
    inside = mask[:, None, None] & (stream < N) & (column < N + 2)
    offsets = tokens.to(tl.int64)[:, None, None] * stride + stream * (N + 2) + column
    return tl.load(pointer + offsets, mask=inside, other=0.0)


@triton.jit
def _store_coefficient_tile(pointer, tile, tokens, mask, N: tl.constexpr, N_PAD: tl.constexpr, M_PAD: tl.constexpr):
    stream, column = tl.arange(0, N_PAD)[None, :, None], tl.arange(0, M_PAD)[None, None, :]
    inside = mask[:, None, None] & (stream < N) & (column < N + 2)
    offsets = tokens.to(tl.int64)[:, None, None] * (N * (N + 2)) + stream * (N + 2) + column
    tl.store(pointer + offsets, tile, mask=inside)


@triton.jit
def _stream_values(pointer, tokens, stride, mask, N: tl.constexpr, N_PAD: tl.constexpr):
    """One value of each stream `[T, N]`, padded with zeros."""
    stream = tl.arange(0, N_PAD)[None, :]
    offsets = tokens.to(tl.int64)[:, None] * stride + stream
    return tl.load(pointer + offsets, mask=mask[:, None] & (stream < N), other=0.0).to(tl.float32)


@triton.jit
def _store_stream_values(pointer, values, tokens, mask, N: tl.constexpr, N_PAD: tl.constexpr):
    stream = tl.arange(0, N_PAD)[None, :]
    tl.store(pointer + tokens.to(tl.int64)[:, None] * N + stream, values, mask=mask[:, None] & (stream < N))


@triton.jit
def _written_beta(written, tokens, stride, mask, N: tl.constexpr, N_PAD: tl.constexpr):
    """b `[T, N]` of the coefficients that a step writes with."""
    stream = tl.arange(0, N_PAD)[None, :]
    offsets = tokens.to(tl.int64)[:, None] * stride + stream * (N + 2) + N + 1
    return tl.load(written + offsets, mask=mask[:, None] & (stream < N), other=0.0)


@triton.jit
def _fn_row(fn, index: tl.constexpr, d, size):
    """Row `[D]` of `fn`."""
    return tl.load(fn + index * size + d, mask=d < size, other=0.0)


@triton.jit
def _column(tile, index: tl.constexpr, M_PAD: tl.constexpr):
    """Column `[T, N]` of a tile `[T, N, M]`."""
    return tl.sum(tl.where(tl.arange(0, M_PAD)[None, None, :] == index, tile, 0.0), axis=2)


@triton.jit
def _row(pointer, tokens, stride, d, mask, size):
    """A row of each token `[T, D]`, float32."""
    offsets = tokens.to(tl.int64)[:, None] * stride + d[None, :]
    return tl.load(pointer + offsets, mask=mask[:, None] & (d < size)[None, :], other=0.0).to(tl.float32)


@triton.jit
def _rows(pointer, tokens, token_stride, stream_stride, d, mask, size, N: tl.constexpr, N_PAD: tl.constexpr):
    """The streams of each token `[T, N, D]`, float32, padded with zeros."""
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
def _streams(
    streams, token_stride, stream_stride, written, written_stride, output, output_stride, rounding,
    tokens, d, mask, size, N: tl.constexpr, N_PAD: tl.constexpr, WRITES: tl.constexpr,
):  # fmt: skip
    """H `[T, N, D]`, float32: the streams, or what is written from them, rounded as it is when stored."""
    if WRITES:
        new = tl.arange(0, N_PAD)[None, :]
        inside = mask[:, None] & (new < N)
        coefficients = written + tokens.to(tl.int64)[:, None] * written_stride
        beta = _written_beta(written, tokens, written_stride, mask, N, N_PAD)
        values = beta[:, :, None] * _row(output, tokens, output_stride, d, mask, size)[:, None, :]
        for i in tl.static_range(N):
            weights = tl.load(coefficients + i * (N + 2) + 1 + new, mask=inside, other=0.0)
            row = _row(streams + i * stream_stride, tokens, token_stride, d, mask, size)
            values += weights[:, :, None] * row[:, None, :]
        return values.to(rounding.dtype.element_ty).to(tl.float32)
    return _rows(streams, tokens, token_stride, stream_stride, d, mask, size, N, N_PAD)


@triton.jit
def _squash(predicted, offset, M_PAD: tl.constexpr, N: tl.constexpr, OFFSET: tl.constexpr, TANH: tl.constexpr):
    """tanh(prediction + offset) of a tile `[T, N, N+2]`."""
    logits = predicted
    if OFFSET:
        column = tl.arange(0, M_PAD)
        logits += tl.load(offset + column, mask=column < N + 2, other=0.0)[None, None, :]
    if TANH:
        return 2.0 * tl.sigmoid(2.0 * logits) - 1.0
    return logits


@triton.jit
def _scales(alpha_scale, beta_scale, N: tl.constexpr, M_PAD: tl.constexpr):
    """`[1, 1, N+2]`."""
    return tl.where(tl.arange(0, M_PAD)[None, None, :] <= N, tl.load(alpha_scale), tl.load(beta_scale))


@triton.jit(do_not_specialize=["token_count"])
def _forward(
    streams, token_stride, stream_stride, written, written_stride, output, output_stride,
    static_alpha, static_beta, fn, offset, alpha_scale, beta_scale,
    next_streams, branch_input, coefficients, predicted, deviation, mean,
    token_count, size, eps,
    N: tl.constexpr, N_PAD: tl.constexpr, M_PAD: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
    WRITES: tl.constexpr, READS: tl.constexpr, DYNAMIC: tl.constexpr,
    OFFSET: tl.constexpr, CENTRED: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * T + tl.arange(0, T)
    mask = tokens < token_count
    stream, column = tl.arange(0, N_PAD)[None, :, None], tl.arange(0, M_PAD)[None, None, :]

    if READS:
        in_alpha = (stream < N) & (column <= N)
        static = tl.load(static_alpha + stream * (N + 1) + column, mask=in_alpha, other=0.0)
        in_beta = (stream < N) & (column == N + 1)
        static += tl.load(static_beta + stream + 0 * column, mask=in_beta, other=0.0)
        used = tl.broadcast_to(static, (T, N_PAD, M_PAD))
    if DYNAMIC:
        centre = tl.zeros((T, N_PAD), tl.float32)
        if CENTRED:
            # before anything else is summed: sums of a large mean would cancel
            for start in range(0, size, BLOCK):
                d = start + tl.arange(0, BLOCK)
                h = _streams(
                    streams, token_stride, stream_stride, written, written_stride, output, output_stride,
                    next_streams, tokens, d, mask, size, N, N_PAD, WRITES,
                )  # fmt: skip
                centre += tl.sum(h, axis=2)
            centre /= size
            _store_stream_values(mean, centre, tokens, mask, N, N_PAD)
        products = tl.zeros((T, N_PAD, M_PAD), tl.float32)
        squares = tl.zeros((T, N_PAD), tl.float32)
        for start in range(0, size, BLOCK):
            d = start + tl.arange(0, BLOCK)
            h = _streams(
                streams, token_stride, stream_stride, written, written_stride, output, output_stride, next_streams,
                tokens, d, mask, size, N, N_PAD, WRITES,
            )  # fmt: skip
            if CENTRED:
                h = tl.where((d < size)[None, None, :], h - centre[:, :, None], 0.0)
            squares += tl.sum(h * h, axis=2)
            for c in tl.static_range(N + 2):
                row = _fn_row(fn, c, d, size)
                products += tl.where(column == c, tl.sum(h * row[None, None, :], axis=2)[:, :, None], 0.0)
        variance = squares / size
        factor = tl.rsqrt(variance + eps)
        prediction = products * factor[:, :, None]
        squashed = _squash(prediction, offset, M_PAD, N, OFFSET, TANH)
        used = static + _scales(alpha_scale, beta_scale, N, M_PAD) * squashed
        _store_stream_values(deviation, factor, tokens, mask, N, N_PAD)
        _store_coefficient_tile(predicted, prediction, tokens, mask, N, N_PAD, M_PAD)
        _store_coefficient_tile(coefficients, used, tokens, mask, N, N_PAD, M_PAD)

    for start in range(0, size, BLOCK):
        d = start + tl.arange(0, BLOCK)
        h = _streams(
            streams, token_stride, stream_stride, written, written_stride, output, output_stride, next_streams,
            tokens, d, mask, size, N, N_PAD, WRITES,
        )  # fmt: skip
        if WRITES:
            _store_rows(next_streams, h, tokens, d, mask, size, N, N_PAD)
        if READS:
            x = tl.sum(_column(used, 0, M_PAD)[:, :, None] * h, axis=1)
            _store_row(branch_input, x, tokens, d, mask, size)


@triton.jit(do_not_specialize=["token_count"])
def _backward(
    streams, token_stride, stream_stride, written, written_stride, output, output_stride, rounding,
    fn, offset, alpha_scale, beta_scale, coefficients, coefficients_stride, predicted, deviation, mean,
    grad_streams, grad_token_stride, grad_stream_stride, grad_input, grad_input_stride, grad_beta,
    new_grad_streams, grad_coefficients, grad_predicted, grad_written_beta, grad_output,
    token_count, size,
    N: tl.constexpr, N_PAD: tl.constexpr, M_PAD: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
    WRITES: tl.constexpr, READS: tl.constexpr, DYNAMIC: tl.constexpr,
    OFFSET: tl.constexpr, CENTRED: tl.constexpr, TANH: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0) * T + tl.arange(0, T)
    mask = tokens < token_count
    column = tl.arange(0, M_PAD)[None, None, :]

    if READS:
        used = _coefficient_tile(coefficients, tokens, coefficients_stride, mask, N, N_PAD, M_PAD)
        of_used = tl.zeros((T, N_PAD, M_PAD), tl.float32)
        if DYNAMIC:
            of_beta_read = _stream_values(grad_beta, tokens, N, mask, N, N_PAD)
            of_used += tl.where(column == N + 1, of_beta_read[:, :, None], 0.0)
        fn_sums = tl.zeros((1, 1, M_PAD), tl.float32)
        for start in range(0, size, BLOCK):
            d = start + tl.arange(0, BLOCK)
            h = _streams(
                streams, token_stride, stream_stride, written, written_stride, output, output_stride, rounding,
                tokens, d, mask, size, N, N_PAD, WRITES,
            )  # fmt: skip
            of_input = _row(grad_input, tokens, grad_input_stride, d, mask, size)
            of_used += tl.where(column == 0, tl.sum(h * of_input[:, None, :], axis=2)[:, :, None], 0.0)
            for j in tl.static_range(N):
                row = _row(grad_streams + j * grad_stream_stride, tokens, grad_token_stride, d, mask, size)
                of_used += tl.where(column == j + 1, tl.sum(h * row[:, None, :], axis=2)[:, :, None], 0.0)
            if DYNAMIC and CENTRED:
                for c in tl.static_range(N + 2):
                    fn_row = _fn_row(fn, c, d, size)
                    fn_sums += tl.where(column == c, tl.sum(fn_row, axis=0), 0.0)
        _store_coefficient_tile(grad_coefficients, of_used, tokens, mask, N, N_PAD, M_PAD)
        if DYNAMIC:
            prediction = _coefficient_tile(predicted, tokens, N * (N + 2), mask, N, N_PAD, M_PAD)
            of_predicted = of_used * _scales(alpha_scale, beta_scale, N, M_PAD)
            if TANH:
                squashed = _squash(prediction, offset, M_PAD, N, OFFSET, TANH)
                of_predicted *= 1.0 - squashed * squashed
            _store_coefficient_tile(grad_predicted, of_predicted, tokens, mask, N, N_PAD, M_PAD)
            factor = _stream_values(deviation, tokens, N, mask, N, N_PAD)
            by_value = -factor * factor * tl.sum(of_predicted * prediction, axis=2) / size
            centre = tl.zeros((T, N_PAD), tl.float32)
            by_constant = tl.zeros((T, N_PAD), tl.float32)
            if CENTRED:
                centre = _stream_values(mean, tokens, N, mask, N, N_PAD)
                by_constant = -factor * tl.sum(of_predicted * fn_sums, axis=2) / size
            scaled = of_predicted * factor[:, :, None]

    if WRITES:
        beta_written = _written_beta(written, tokens, written_stride, mask, N, N_PAD)
        of_beta = tl.zeros((T, N_PAD), tl.float32)
    for start in range(0, size, BLOCK):
        d = start + tl.arange(0, BLOCK)
        if READS:
            of_input = _row(grad_input, tokens, grad_input_stride, d, mask, size)
            grad = _column(used, 0, M_PAD)[:, :, None] * of_input[:, None, :]
            for j in tl.static_range(N):
                row = _row(grad_streams + j * grad_stream_stride, tokens, grad_token_stride, d, mask, size)
                grad += _column(used, j + 1, M_PAD)[:, :, None] * row[:, None, :]
            if DYNAMIC:
                h = _streams(
                    streams, token_stride, stream_stride, written, written_stride, output, output_stride, rounding,
                    tokens, d, mask, size, N, N_PAD, WRITES,
                )  # fmt: skip
                for c in tl.static_range(N + 2):
                    fn_row = _fn_row(fn, c, d, size)
                    grad += _column(scaled, c, M_PAD)[:, :, None] * fn_row[None, None, :]
                if CENTRED:
                    h -= centre[:, :, None]
                grad += by_value[:, :, None] * h + by_constant[:, :, None]
            _store_rows(new_grad_streams, grad, tokens, d, mask, size, N, N_PAD)
        else:
            grad = _rows(grad_streams, tokens, grad_token_stride, grad_stream_stride, d, mask, size, N, N_PAD)
        if WRITES:
            # what lies beyond D is by_constant there, and must not be summed
            grad = tl.where((d < size)[None, None, :], grad, 0.0)
            branch_output = _row(output, tokens, output_stride, d, mask, size)
            of_beta += tl.sum(grad * branch_output[:, None, :], axis=2)
            _store_row(grad_output, tl.sum(beta_written[:, :, None] * grad, axis=1), tokens, d, mask, size)
    if WRITES:
        _store_stream_values(grad_written_beta, of_beta, tokens, mask, N, N_PAD)


@triton.jit(do_not_specialize=["token_count", "tokens_a_chunk"])
def _projection(
    streams, token_stride, stream_stride, written, written_stride, output, output_stride, rounding,
    deviation, mean, grad_predicted, partial,
    token_count, tokens_a_chunk, size,
    N: tl.constexpr, N_PAD: tl.constexpr, M_PAD: tl.constexpr, T: tl.constexpr, BLOCK: tl.constexpr,
    WRITES: tl.constexpr, CENTRED: tl.constexpr,
):  # fmt: skip
    d = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    chunk = tl.program_id(1)
    column = tl.arange(0, M_PAD)[:, None]
    total = tl.zeros((M_PAD, BLOCK), tl.float32)
    for start in range(0, tokens_a_chunk, T):
        tokens = chunk * tokens_a_chunk + start + tl.arange(0, T)
        mask = (tokens < token_count) & (start + tl.arange(0, T) < tokens_a_chunk)
        h = _streams(
            streams, token_stride, stream_stride, written, written_stride, output, output_stride, rounding,
            tokens, d, mask, size, N, N_PAD, WRITES,
        )  # fmt: skip
        if CENTRED:
            h -= _stream_values(mean, tokens, N, mask, N, N_PAD)[:, :, None]
        factor = _stream_values(deviation, tokens, N, mask, N, N_PAD)
        scaled = _coefficient_tile(grad_predicted, tokens, N * (N + 2), mask, N, N_PAD, M_PAD) * factor[:, :, None]
        for c in tl.static_range(N + 2):
            of_row = tl.sum(tl.sum(_column(scaled, c, M_PAD)[:, :, None] * h, axis=1), axis=0)
            total += tl.where(column == c, of_row[None, :], 0.0)
    offsets = (chunk.to(tl.int64) * (N + 2) + column) * size + d[None, :]
    tl.store(partial + offsets, total, mask=(column < N + 2) & (d < size)[None, :])
