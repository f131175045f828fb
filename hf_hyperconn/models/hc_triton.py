# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Steps (see `hc_step.py`) by Triton kernels, `hc_kernels.py`, as operators."""

from functools import cache

import torch

from .computing import by_token, operator, operator_namespace, refuse_shape
from .hc_kernels import _backward, _forward, _projection, triton
from .hc_torch import CoefficientParameters, Read, StepFunctions, StepGrads, coefficient_grads

_NAMESPACE = operator_namespace(__name__)
# values of a token's streams in a thread: of 16 to 128, those that are fastest on an H100 in nearly every shape of
# benchmarks/kernels.py
_VALUES = 64
_PROJECTION_BLOCK, _PROJECTION_CHUNKS = 512, 192
_OPTIONS = {"enable_fp_fusion": True}


def _dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _strides(tensor: torch.Tensor | None, inner: int) -> tuple[int, ...]:
    """Return the strides of `by_token(tensor, inner)` but the last, which is 1; zeros for None."""
    return (0,) * inner if tensor is None else tensor.stride()[:-1]


def _token_stride(coefficients: torch.Tensor | None) -> int:
    """Return the stride from one token's coefficients to the next's: none when they are static."""
    if coefficients is None or coefficients.dim() == 2:
        return 0
    return coefficients.shape[-1] * coefficients.shape[-2]


@cache
def _sizes(n: int, size: int) -> dict[str, int]:
    """Return the constants that forward and backward are compiled for."""
    padded, block = triton.next_power_of_2(n), triton.next_power_of_2(size)
    warps = max(1, padded * block // (32 * _VALUES))  # 16 for `MAX_TRITON_VALUES`
    return {"N": n, "N_PAD": padded, "BLOCK": block, "num_warps": warps}


@cache
def _projection_sizes(n: int, size: int) -> dict[str, int]:
    """Return the constants that the projection's gradient is compiled for."""
    block = min(_PROJECTION_BLOCK, triton.next_power_of_2(size))
    padded = {"N_PAD": triton.next_power_of_2(n), "M_PAD": triton.next_power_of_2(n + 2)}
    return {"N": n, **padded, "BLOCK": block, "num_warps": 2}


def _written_dtype(streams: torch.Tensor, branch_output: torch.Tensor | None) -> torch.dtype:
    return streams.dtype if branch_output is None else torch.promote_types(streams.dtype, branch_output.dtype)


def _forward_results(streams, branch_output, static_alpha, fn, centred):
    """Return places for H, x, coefficients, prediction, deviation and mean, empty for results that a step lacks."""
    tokens, n = streams.shape[:-2], streams.shape[-2]
    float32 = {"dtype": torch.float32, "device": streams.device}
    dtype = _written_dtype(streams, branch_output)
    writes, reads, is_dynamic = branch_output is not None, static_alpha is not None, fn is not None
    return (
        torch.empty(streams.shape if writes else (0,), dtype=dtype, device=streams.device),
        torch.empty((*tokens, streams.shape[-1]) if reads else (0,), dtype=dtype, device=streams.device),
        torch.empty((*tokens, n, n + 2) if is_dynamic else (0,), **float32),
        torch.empty((*tokens, n, n + 2) if is_dynamic else (0,), **float32),
        torch.empty((*tokens, n) if is_dynamic else (0,), **float32),
        torch.empty((*tokens, n) if is_dynamic and centred else (0,), **float32),
    )


@operator(f"{_NAMESPACE}::step_forward", _forward_results)
def _step_forward(
    streams: torch.Tensor,
    written: torch.Tensor | None,
    branch_output: torch.Tensor | None,
    static_alpha: torch.Tensor | None,
    static_beta: torch.Tensor | None,
    fn: torch.Tensor | None,
    offset: torch.Tensor | None,
    alpha_scale: torch.Tensor | None,
    beta_scale: torch.Tensor | None,
    eps: float,
    centred: bool,
    tanh: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    refuse_shape(branch_output, streams)
    results = _forward_results(streams, branch_output, static_alpha, fn, centred)
    h, f = by_token(streams, 2), by_token(branch_output, 1)
    if h.numel() == 0:
        return results
    written, static_alpha, static_beta = map(_dense, (written, static_alpha, static_beta))
    with torch.cuda.device_of(h):
        _forward[(h.shape[0],)](
            h, *_strides(h, 2), written, _token_stride(written), f, *_strides(f, 1),
            static_alpha, static_beta, fn, offset, alpha_scale, beta_scale, *results,
            h.shape[-1], eps, **_sizes(*h.shape[1:]),
            WRITES=f is not None, READS=static_alpha is not None, DYNAMIC=fn is not None,
            OFFSET=offset is not None, CENTRED=centred, TANH=tanh, **_OPTIONS,
        )  # fmt: skip
    return results


def _backward_results(grad_streams, branch_output, coefficients, fn):
    """Return places for the gradients of S, coefficients, prediction, b' and f, empty for those that a step lacks."""
    tokens, n = grad_streams.shape[:-2], grad_streams.shape[-2]
    float32 = {"dtype": torch.float32, "device": grad_streams.device}
    reads, writes = coefficients is not None, branch_output is not None
    return (
        torch.empty(grad_streams.shape if reads else (0,), dtype=grad_streams.dtype, device=grad_streams.device),
        torch.empty((*tokens, n, n + 2) if reads else (0,), **float32),
        torch.empty((*tokens, n, n + 2) if fn is not None else (0,), **float32),
        torch.empty((*tokens, n) if writes else (0,), **float32),
        torch.empty(branch_output.shape, dtype=branch_output.dtype, device=branch_output.device)
        if writes
        else torch.empty(0, **float32),
    )


@operator(f"{_NAMESPACE}::step_backward", _backward_results)
def _step_backward(
    streams: torch.Tensor | None,
    written: torch.Tensor | None,
    branch_output: torch.Tensor | None,
    fn: torch.Tensor | None,
    offset: torch.Tensor | None,
    alpha_scale: torch.Tensor | None,
    beta_scale: torch.Tensor | None,
    coefficients: torch.Tensor | None,
    predicted: torch.Tensor | None,
    deviation: torch.Tensor | None,
    mean: torch.Tensor | None,
    centred: bool,
    tanh: bool,
    grad_streams: torch.Tensor,
    grad_input: torch.Tensor | None,
    grad_beta: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    refuse_shape(branch_output, grad_streams)
    refuse_shape(grad_input, grad_streams)
    results = _backward_results(grad_streams, branch_output, coefficients, fn)
    of_h, of_x, f = by_token(grad_streams, 2), by_token(grad_input, 1), by_token(branch_output, 1)
    if of_h.numel() == 0:
        return results
    h = by_token(streams, 2)
    written, of_beta = _dense(written), _dense(grad_beta)
    with torch.cuda.device_of(of_h):
        _backward[(of_h.shape[0],)](
            h, *_strides(h, 2), written, _token_stride(written), f, *_strides(f, 1), of_h,
            fn, offset, alpha_scale, beta_scale, coefficients, _token_stride(coefficients), predicted, deviation, mean,
            of_h, *_strides(of_h, 2), of_x, *_strides(of_x, 1), of_beta, *results,
            of_h.shape[-1], **_sizes(*of_h.shape[1:]),
            WRITES=f is not None, READS=coefficients is not None, DYNAMIC=fn is not None,
            OFFSET=offset is not None, CENTRED=centred, TANH=tanh, **_OPTIONS,
        )  # fmt: skip
    return results


def _projection_results(streams):
    return torch.empty((streams.shape[-2] + 2, streams.shape[-1]), dtype=torch.float32, device=streams.device)


@operator(f"{_NAMESPACE}::projection_backward", _projection_results)
def _projection_backward(
    streams: torch.Tensor,
    written: torch.Tensor | None,
    branch_output: torch.Tensor | None,
    deviation: torch.Tensor,
    mean: torch.Tensor | None,
    grad_predicted: torch.Tensor,
) -> torch.Tensor:
    refuse_shape(branch_output, streams)
    n, size = streams.shape[-2:]
    h, f = by_token(streams, 2), by_token(branch_output, 1)
    sizes = _projection_sizes(n, size)
    tokens_a_chunk = max(1, triton.cdiv(h.shape[0], _PROJECTION_CHUNKS))
    chunks = triton.cdiv(h.shape[0], tokens_a_chunk)
    partial = torch.empty((chunks, n + 2, size), dtype=torch.float32, device=streams.device)
    if chunks == 0:
        return partial.sum(0)
    written = _dense(written)
    rounding = torch.empty(0, dtype=_written_dtype(streams, branch_output), device=streams.device)
    with torch.cuda.device_of(h):
        _projection[triton.cdiv(size, sizes["BLOCK"]), chunks](
            h, *_strides(h, 2), written, _token_stride(written), f, *_strides(f, 1), rounding,
            deviation, mean, grad_predicted, partial, h.shape[0], tokens_a_chunk, size, **sizes,
            WRITES=f is not None, CENTRED=mean is not None, **_OPTIONS,
        )  # fmt: skip
    return partial.sum(0)


def step_forward(
    streams: torch.Tensor,
    coefficients: torch.Tensor | None,
    branch_output: torch.Tensor | None,
    parameters: CoefficientParameters | None,
) -> tuple[torch.Tensor, Read | None]:
    """As in `StepFunctions`."""
    settings = (0.0, False, False) if parameters is None else parameters[6:]
    tensors = (None,) * 6 if parameters is None else parameters[:6]
    written, x, read_coefficients, *values = _step_forward(streams, coefficients, branch_output, *tensors, *settings)
    streams = streams if coefficients is None else written
    if parameters is None:
        return streams, None
    if parameters.fn is None:
        return streams, Read(x, parameters.static())
    predicted, deviation, mean = values
    return streams, Read(x, read_coefficients, predicted, deviation, mean if parameters.centred else None)


def step_backward(
    streams: torch.Tensor | None,
    coefficients: torch.Tensor | None,
    branch_output: torch.Tensor | None,
    parameters: CoefficientParameters | None,
    result: Read | None,
    grad_streams: torch.Tensor,
    grad_input: torch.Tensor | None,
    grad_beta: torch.Tensor | None,
    wants_fn: bool,
) -> StepGrads:
    """As in `StepFunctions`."""
    reads, writes = parameters is not None, coefficients is not None
    is_dynamic = reads and parameters.fn is not None
    new_grad_streams, of_coefficients, of_predicted, of_beta, of_output = _step_backward(
        streams if reads else None,
        coefficients,
        branch_output,
        *(parameters[2:6] if reads else (None,) * 4),
        *(result[1:] if reads else (None,) * 4),
        reads and parameters.centred,
        reads and parameters.tanh,
        grad_streams,
        grad_input,
        grad_beta,
    )
    of_parameters = None
    if reads:
        of_predicted = of_predicted if is_dynamic else None
        of_fn = None
        if is_dynamic and wants_fn:
            of_fn = _projection_backward(
                streams, coefficients, branch_output, result.deviation, result.mean, of_predicted
            )
        of_parameters = coefficient_grads(parameters, result, of_coefficients, of_predicted, of_fn)
    return StepGrads(
        new_grad_streams if reads else grad_streams,
        of_parameters,
        of_beta if writes else None,
        of_output if writes else None,
    )


BY_KERNELS = StepFunctions(step_forward, step_backward)
