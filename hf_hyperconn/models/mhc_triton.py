# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The operators that run the kernels of mHC and iHC (see `mhc_kernels.py`).

Streams are `[B, S, N, D]` with any strides. Coefficients are float32: reads and writes `[B, S, N]` and the mix
`[B, S, N, N]`, H_res by rows; for iHC an empty tensor. Predictions, `[B, S, M]`, are the normed streams times `fn`.
"""

from functools import cache

import torch

from .computing import on_device_of, operator, operator_namespace, refuse_shape, token_rows
from .mhc_kernels import (
    _coefficients,
    _coefficients_backward,
    _dot_backward,
    _project,
    _projection_backward,
    _read,
    _read_backward,
    _write,
    _write_backward,
    triton,
)

_NAMESPACE = operator_namespace(__name__)
_CHUNKS = 8
# the same arithmetic in every kernel, so that values made again are equal
_OPTIONS = {"num_warps": 4, "enable_fp_fusion": False}
# a program of one warp has a token in each thread, and that token's whole mix
_COEFFICIENT_OPTIONS = {**_OPTIONS, "num_warps": 1}


@cache
def _sizes(n: int, size: int, mixes: bool) -> dict[str, dict[str, int | bool]]:
    """Return the constants that each kernel is compiled for."""
    padded, m = triton.next_power_of_2(n), n * n + 2 * n if mixes else 2 * n
    m_padded, whole = max(16, triton.next_power_of_2(m)), triton.next_power_of_2(size)
    streams, mix, rows = {"N": n, "N_PAD": padded}, {"MIXES": mixes}, {"N": n, "M": m, "M_PAD": m_padded}
    # threads side by side along D, so that sums over the streams stay within a thread
    wide = {"T": 1, "BLOCK": min(1024, whole)}
    return {
        "project": {**rows, **({"T": 32, "BLOCK": 64} if m_padded < 64 else {"T": 16, "BLOCK": 32})},
        "coefficients": {**streams, **mix, "M": m, "T": 32 if padded < 8 else 8},
        "read": {**streams, **wide},
        "write": {**streams, **mix, **wide},
        "write_backward": {**streams, **wide},
        "dot_backward": {**streams, **mix, **wide},
        "read_backward": {**streams, **mix, "M": m, "T": 64 // padded, "BLOCK": min(64, whole)},
        "projection_backward": {**rows, "T": 8, "BLOCK": min(4096 // m_padded, whole)},
    }


def _width_results(
    streams: torch.Tensor, mixes: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    *tokens, n, size = streams.shape
    shapes = [(n,), (n,), (n, n), (n * n + 2 * n if mixes else 2 * n,), ()]
    read, write, mix, predicted, deviation = (
        torch.empty((*tokens, *shape), dtype=torch.float32, device=streams.device) for shape in shapes
    )
    branch_input = torch.empty((*tokens, size), dtype=streams.dtype, device=streams.device)
    return branch_input, read, write, mix if mixes else mix.new_empty(0), predicted, deviation


@operator(f"{_NAMESPACE}::width_forward", _width_results)
def width_forward(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    mixes: bool,
    iters: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the branch input `[B, S, D]`, reads, writes, mix, predictions, and the norm's 1 / sqrt(...) `[B, S]`."""
    results = _width_results(streams, mixes)
    n, d = streams.shape[-2:]
    if streams.numel() == 0:
        return results
    (h, *h_strides), count = token_rows(streams, 2), streams.numel() // (n * d)
    branch_input, read, write, mix, predicted, deviation = results
    fn, base, scale, sizes = fn.contiguous(), base.contiguous(), scale.contiguous(), _sizes(n, d, mixes)
    products, squares = (deviation.new_empty(count, n, *shape) for shape in ((fn.shape[0],), ()))
    with on_device_of(h):
        _project[_parts(count, sizes["project"]["T"]), n](
            h, *h_strides, fn, products, squares, count, d, **sizes["project"], **_OPTIONS
        )
        _coefficients[(_parts(count, sizes["coefficients"]["T"]),)](
            products, squares, base, scale, read, write, mix, predicted, deviation, count, d, iters, eps,
            **sizes["coefficients"], **_COEFFICIENT_OPTIONS,
        )  # fmt: skip
        _read[_grid(count, d, sizes["read"])](h, *h_strides, read, branch_input, count, d, **sizes["read"], **_OPTIONS)
    return results


def _parts(length: int, of: int) -> int:
    """Return the number of parts of a length; `triton.cdiv` takes ten times as long."""
    return -(-length // of)


def _grid(count: int, size: int, sizes: dict[str, int | bool]) -> tuple[int, int]:
    return _parts(count, sizes["T"]), _parts(size, sizes["BLOCK"])


def _width_backward_results(
    streams: torch.Tensor, predicted: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    m = predicted.shape[-1]
    of_parameters = predicted.new_empty((*predicted.shape[:-1], m + (3 if m > 2 * streams.shape[-2] else 2)))
    return streams.new_empty(streams.shape), of_parameters, torch.empty_like(predicted)


@operator(f"{_NAMESPACE}::width_backward", _width_backward_results)
def width_backward(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    mixes: bool,
    iters: int,
    eps: float,
    read: torch.Tensor,
    mix: torch.Tensor,
    predicted: torch.Tensor,
    deviation: torch.Tensor,
    grad_streams: torch.Tensor,
    grad_input: torch.Tensor,
    grad_write: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of streams, of each token's logits and scales, and of products with `fn`, `[B, S, M]`.

    Gradients of logits and scales are one row, `[B, S, M + 3]`, for iHC `[B, S, M + 2]`.

    grad_streams: the gradient of the mixed streams.
    """
    refuse_shape(grad_input, streams)
    results = _width_backward_results(streams, predicted)
    n, d = streams.shape[-2:]
    if streams.numel() == 0:
        return results
    (h, *h_strides), count = token_rows(streams, 2), streams.numel() // (n * d)
    (of_h, *of_h_strides), (of_x, *of_x_strides) = token_rows(grad_streams, 2), token_rows(grad_input, 1)
    new_grad_streams, of_parameters, of_products = results
    fn, base, scale, sizes = fn.contiguous(), base.contiguous(), scale.contiguous(), _sizes(n, d, mixes)
    grad_read, grad_mix, of_values = torch.empty_like(read), torch.empty_like(mix), torch.empty_like(deviation)
    with on_device_of(h):
        _dot_backward[(_parts(count, sizes["dot_backward"]["T"]),)](
            h, *h_strides, of_h, *of_h_strides, of_x, *of_x_strides, grad_read, grad_mix, count, d,
            **sizes["dot_backward"], **_OPTIONS,
        )  # fmt: skip
        _coefficients_backward[(_parts(count, sizes["coefficients"]["T"]),)](
            predicted, deviation, base, scale, grad_read, grad_write.contiguous(), grad_mix,
            of_parameters, of_products, of_values, count, d, iters, eps,
            **sizes["coefficients"], **_COEFFICIENT_OPTIONS,
        )  # fmt: skip
        _read_backward[_grid(count, d, sizes["read_backward"])](
            h, *h_strides, fn, read, mix, of_products, of_values, of_h, *of_h_strides, of_x, *of_x_strides,
            new_grad_streams, count, d, **sizes["read_backward"], **_OPTIONS,
        )  # fmt: skip
    return results


def _projection_results(streams: torch.Tensor, of_products: torch.Tensor) -> torch.Tensor:
    size = streams.shape[-2] * streams.shape[-1]
    return torch.empty((of_products.shape[-1], size), dtype=torch.float32, device=streams.device)


@operator(f"{_NAMESPACE}::projection_backward", _projection_results)
def projection_backward(streams: torch.Tensor, of_products: torch.Tensor) -> torch.Tensor:
    """Return the gradient of `fn`, `[M, N D]`, from the gradient of the products."""
    (h, *h_strides), n, d, m = token_rows(streams, 2), *streams.shape[-2:], of_products.shape[-1]
    count, sizes = streams.numel() // (n * d), _sizes(n, d, m > 2 * n)["projection_backward"]
    tokens_a_chunk = _parts(_parts(count, _CHUNKS), sizes["T"]) * sizes["T"]
    chunks = _parts(count, max(1, tokens_a_chunk))
    partial = torch.empty((chunks, m, n * d), dtype=torch.float32, device=streams.device)
    if chunks > 0:
        with on_device_of(h):
            _projection_backward[_parts(d, sizes["BLOCK"]), n, chunks](
                h, *h_strides, of_products, partial, count, tokens_a_chunk, d, **sizes, **_OPTIONS
            )
    return partial.sum(0)


def _depth_results(streams: torch.Tensor, branch_output: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(streams.dtype, branch_output.dtype)
    return torch.empty(streams.shape, dtype=dtype, device=streams.device)


@operator(f"{_NAMESPACE}::depth_forward", _depth_results)
def depth_forward(
    streams: torch.Tensor, write: torch.Tensor, mix: torch.Tensor, mixes: bool, branch_output: torch.Tensor
) -> torch.Tensor:
    """Return the next streams, in the dtype of `streams + branch_output`."""
    refuse_shape(branch_output, streams)
    results = _depth_results(streams, branch_output)
    if streams.numel() > 0:
        (h, *h_strides), (f, *f_strides) = token_rows(streams, 2), token_rows(branch_output, 1)
        n, size = streams.shape[-2:]
        count, sizes = streams.numel() // (n * size), _sizes(n, size, mixes)["write"]
        with on_device_of(h):
            _write[_grid(count, size, sizes)](
                h, *h_strides, write.contiguous(), mix.contiguous(), f, *f_strides, results, count, size,
                **sizes, **_OPTIONS,
            )  # fmt: skip
    return results


def _depth_backward_results(grad: torch.Tensor, branch_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    grad_write = torch.empty(grad.shape[:-1], dtype=torch.float32, device=grad.device)
    return grad_write, torch.empty(branch_output.shape, dtype=branch_output.dtype, device=grad.device)


@operator(f"{_NAMESPACE}::depth_backward", _depth_backward_results)
def depth_backward(
    grad: torch.Tensor, write: torch.Tensor, branch_output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of writes and branch output from the gradient of the next, or the mixed, streams."""
    refuse_shape(branch_output, grad)
    results = _depth_backward_results(grad, branch_output)
    if grad.numel() > 0:
        (of_next, *strides), (f, *f_strides) = token_rows(grad, 2), token_rows(branch_output, 1)
        n, d = grad.shape[-2:]
        count, sizes = grad.numel() // (n * d), _sizes(n, d, False)["write_backward"]
        with on_device_of(of_next):
            _write_backward[(_parts(count, sizes["T"]),)](
                of_next, *strides, write.contiguous(), f, *f_strides, *results, count, d,
                **sizes, **_OPTIONS,
            )  # fmt: skip
    return results
