# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Steps (see `hc_step.py`) by Triton kernels, `hc_kernels.py`: their autograd, and the operators that launch them.

In eager mode a step takes the processor longer than a GPU. So each half of it makes few tensors and few calls: the
parameters go in as they are, and their gradients come out as they are kept.
"""

from dataclasses import dataclass
from functools import cache

import torch

from .computing import gradients, needs_autograd, on_device_of, operator, operator_namespace, refuse_shape, token_rows
from .connection import Streams, as_new_output, broadcast_output, without_autocast
from .hc_kernels import _backward, _forward, _parameters, _total, triton
from .hc_torch import ConnectionParameters, addition, write_and_read

_NAMESPACE = operator_namespace(__name__)
# values of a token's streams in a thread: of 16 to 128, those that are fastest on an H100 in nearly every shape of
# benchmarks/kernels.py
_VALUES = 64
_PARAMETER_BLOCK, _PARAMETER_CHUNKS, _TOTAL_BLOCK = 512, 192, 32
_OPTIONS = {"enable_fp_fusion": True}


@dataclass(eq=False)
class KernelCarry:
    """The carry of a width connection by the kernels.

    streams: H, `[B, S, N, D]`, with the gradient of A_r^T H.
    values: A and the predictions, without a gradient, `[B, S, R]`, or `[R]` when static; float32.
    beta: b, `[B, S, N]`, float32.
    """

    streams: torch.Tensor
    values: torch.Tensor
    beta: torch.Tensor

    def write(self, branch_output: torch.Tensor) -> Streams:
        """Return the next streams, to which the next step writes a branch output `[B, S, D]`."""
        *tokens, _, size = self.streams.shape
        return UnwrittenByKernels(self.streams, self, broadcast_output(branch_output, (*tokens, size)))


@dataclass(eq=False)
class UnwrittenByKernels(Streams):
    """Residual streams to which the next step writes the output of the branch before.

    values: S.
    carry, branch_output: the carry of the read before the branch, and f.
    """

    carry: KernelCarry
    branch_output: torch.Tensor

    def written(self) -> torch.Tensor:
        """Return H, `[B, S, N, D]`."""
        with without_autocast(self.values):
            (values,) = _run(self, None)
        return values


def read_by_kernels(streams: Streams, parameters: ConnectionParameters) -> tuple[torch.Tensor, KernelCarry]:
    """Return the branch input `[B, S, D]` and the carry of a step that reads, after it has written."""
    handed_on, branch_input, values, beta = _run(streams, parameters)
    return branch_input, KernelCarry(handed_on, values, beta)


def _run(streams: Streams, parameters: ConnectionParameters | None) -> tuple[torch.Tensor, ...]:
    tensors, settings = ((), None) if parameters is None else (parameters[:8], parameters[8:])
    if isinstance(streams, UnwrittenByKernels):
        carry = streams.carry
        write = streams.values, carry.values, carry.beta, streams.branch_output
    else:
        write = streams.written(), None, None, None
    if torch.is_grad_enabled() and not torch.jit.is_tracing():  # a trace can't hold a Function
        return _Step.apply(settings, *write, *tensors)
    found, *_ = _forward_of(settings, *write, *tensors)
    return found


def _forward_of(settings, streams, values, beta, branch_output, *tensors):
    """Return the results of a step, and `fn` and its offset with the norm folded in, each or None."""
    if settings is None:
        return _step_forward(streams, values, beta, branch_output, *[None] * 6, 0.0, False, False), None, None
    static_alpha, static_beta, alpha_fn, beta_fn, weight, bias, *scales = tensors
    fn = offset = None
    if alpha_fn is not None:
        fn = torch.cat([alpha_fn.t(), beta_fn.unsqueeze(0)])
        offset = None if bias is None else (fn * bias).sum(-1)
        fn = fn if weight is None else fn.mul_(weight)
    read = static_alpha, static_beta, fn, offset, *scales, *settings
    results = _step_forward(streams, values, beta, branch_output, *read)
    return (results if beta is not None else [streams, *results]), fn, offset


class _Step(torch.autograd.Function):
    """A step. It returns the streams that it hands on and, when it reads, the branch input, values and b."""

    @staticmethod
    def forward(ctx, settings, streams, values, beta, branch_output, *tensors):
        ctx.settings = settings
        ctx.set_materialize_grads(False)  # or the values would get a gradient of zeros
        results, fn, offset = _forward_of(settings, streams, values, beta, branch_output, *tensors)
        if settings is None:  # writing alone needs no streams in its backward
            ctx.save_for_backward(None, values, beta, branch_output)
            return (as_new_output(results[0]),)
        next_streams, branch_input, new_values, new_beta = results
        ctx.save_for_backward(streams, values, beta, branch_output, *tensors, new_values, fn, offset)
        ctx.mark_non_differentiable(new_values)
        handed_on = streams.view_as(streams) if beta is None else as_new_output(next_streams)
        return handed_on, as_new_output(branch_input), new_values, as_new_output(new_beta)

    @staticmethod
    def backward(ctx, grad_streams, grad_input=None, _=None, grad_beta=None):
        saved, settings = ctx.saved_tensors, ctx.settings
        if settings is not None:
            streams, output, (*tokens, n, size) = saved[0], saved[3], saved[0].shape
            dtype = _written_dtype(streams, output)
            # of outputs that nothing was made of
            if grad_streams is None:
                grad_streams = streams.new_zeros(streams.shape, dtype=dtype)
            if grad_input is None:
                grad_input = streams.new_zeros((*tokens, size), dtype=dtype)
            if grad_beta is None:
                grad_beta = streams.new_zeros((*tokens, n), dtype=torch.float32)
        with without_autocast(grad_streams):
            if needs_autograd():
                return None, *_by_autograd(settings, saved[:12], (grad_streams, grad_input, grad_beta))
            if settings is None:
                of_write = _step_backward(*saved, *[None] * 5, False, False, grad_streams, None, None)
                return None, grad_streams, None, *of_write
            write, tensors, (values, fn, offset) = saved[:4], saved[4:12], saved[12:]
            arguments = fn, offset, *tensors[6:], values, *settings[1:], grad_streams, grad_input, grad_beta
            of_streams, grads, *of_write = _step_backward(*write, *arguments)
            of_tensors: tuple = (None,) * 8
            if any(ctx.needs_input_grad[5:]):
                of_tensors = _of_parameters(write, tensors, values, grads, settings[1])
        return None, of_streams, None, *(of_write or (None, None)), *of_tensors


def _of_parameters(write, tensors, values, grads, centred):
    """Return the gradients of a step's parameters, from the rows of each token's."""
    static_alpha, static_beta, alpha_fn, *others = tensors
    alphas, betas = static_alpha.numel(), static_beta.numel()
    if alpha_fn is None:
        of_alpha, of_beta = grads.flatten(0, -2).sum(0).split_with_sizes([alphas, betas])
        return of_alpha.view_as(static_alpha), of_beta, *[None] * 6
    beta_fn, weight, bias, *_ = others
    of_static, of_alpha_fn, of_beta_fn, *of_norm = _parameters_backward(
        *write, values, grads, alpha_fn, beta_fn, weight, bias, centred
    )
    of_alpha, of_beta, *of_scales = of_static.split_with_sizes([alphas, betas, 1, 1])
    of_weight = None if weight is None else of_norm[0]
    of_bias = None if bias is None else of_norm[-1]
    return of_alpha.view_as(static_alpha), of_beta, of_alpha_fn, of_beta_fn, of_weight, of_bias, *of_scales


def _by_autograd(settings, saved, grads):
    """Return the gradients of the arguments of `_Step.forward` behind `settings`, with a graph of their own."""
    streams, values, *leaves = saved
    of_streams, of_input, of_beta = grads
    if settings is None:
        of_write = gradients(lambda beta, output: (addition(beta.unsqueeze(-1), output),), leaves, (of_streams,))
        return of_streams, None, *of_write

    def step(streams, beta, branch_output, *tensors):
        coefficients = None
        if beta is not None:
            *tokens, n = beta.shape
            alpha = values[..., : n * (n + 1)].unflatten(-1, (n, n + 1)).expand(*tokens, n, n + 1)
            coefficients = torch.cat([alpha, beta.unsqueeze(-1)], dim=-1)
        parameters = ConnectionParameters(*tensors, *settings).folded()
        mixed, branch_input, new_beta = write_and_read(streams, coefficients, branch_output, parameters)
        return mixed, branch_input, new_beta.expand_as(of_beta)

    found = gradients(step, (streams, *leaves), (of_streams, of_input, of_beta))
    return found[0], None, *found[1:]


def _dense(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.contiguous()


def _row_stride(values: torch.Tensor | None) -> int:
    """Return the stride from one token's row of values to the next's: none when they are static."""
    return 0 if values is None or values.dim() == 1 else values.shape[-1]


@cache
def _sizes(n: int, size: int) -> dict[str, int]:
    """Return the constants that forward and backward are compiled for."""
    padded, block = triton.next_power_of_2(n), triton.next_power_of_2(size)
    warps = max(1, padded * block // (32 * _VALUES))  # 16 for `MAX_TRITON_VALUES`
    return {"N": n, "N_PAD": padded, "BLOCK": block, "num_warps": warps, **_OPTIONS}


def _row_sizes(n: int) -> dict[str, int]:
    padded = {"N_PAD": triton.next_power_of_2(n), "M_PAD": triton.next_power_of_2(n + 2)}
    return {"N": n, **padded, "R_PAD": triton.next_power_of_2(2 * n * (n + 2) + 2)}


@cache
def _parameter_sizes(n: int, size: int) -> dict[str, int]:
    """Return the constants that the parameters' gradients over a chunk are compiled for."""
    block = min(_PARAMETER_BLOCK, triton.next_power_of_2(size))
    return {**_row_sizes(n), "T": 16, "BLOCK": block, "num_warps": 2, **_OPTIONS}


@cache
def _total_sizes(n: int, size: int) -> dict[str, int]:
    """Return the constants that the parameters' gradients over all chunks are compiled for."""
    block = min(_TOTAL_BLOCK, triton.next_power_of_2(size))
    return {**_row_sizes(n), "CHUNKS": 16, "BLOCK": block, "num_warps": 4, **_OPTIONS}


def _written_dtype(streams: torch.Tensor, branch_output: torch.Tensor | None) -> torch.dtype:
    if branch_output is None or branch_output.dtype == streams.dtype:
        return streams.dtype
    return torch.promote_types(streams.dtype, branch_output.dtype)


def _forward_results(streams, branch_output, static_alpha, fn, centred):
    """Return places for H when the step writes; for x, values and b when it reads."""
    *tokens, n, size = streams.shape
    dtype = _written_dtype(streams, branch_output)
    results = [] if branch_output is None else [streams.new_empty(streams.shape, dtype=dtype)]
    if static_alpha is not None:
        values = (n * (n + 1),) if fn is None else (*tokens, n * (2 * n + 4 + centred))
        results.append(streams.new_empty((*tokens, size), dtype=dtype))
        results += [streams.new_empty(shape, dtype=torch.float32) for shape in (values, (*tokens, n))]
    return results


@operator(f"{_NAMESPACE}::step_forward", _forward_results)
def _step_forward(
    streams: torch.Tensor,
    written: torch.Tensor | None,
    beta: torch.Tensor | None,
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
) -> list[torch.Tensor]:
    refuse_shape(branch_output, streams)
    results = _forward_results(streams, branch_output, static_alpha, fn, centred)
    if streams.numel() == 0:
        return results
    next_streams = streams if branch_output is None else results[0]
    branch_input, values, next_beta = (None,) * 3 if static_alpha is None else results[-3:]
    h, *h_strides = token_rows(streams, 2)
    f, *f_strides = token_rows(branch_output, 1)
    n, size = streams.shape[-2:]
    with on_device_of(h):
        _forward[(h.numel() // (n * size),)](
            h, *h_strides, _dense(written), _row_stride(written), _dense(beta), f, *f_strides,
            _dense(static_alpha), _dense(static_beta), fn, offset, alpha_scale, beta_scale,
            next_streams, branch_input, values, _row_stride(values), next_beta, size, eps, **_sizes(n, size),
            WRITES=f is not None, READS=static_alpha is not None, DYNAMIC=fn is not None,
            OFFSET=offset is not None, CENTRED=centred, TANH=tanh,
        )  # fmt: skip
    return results


def _backward_results(grad_streams, branch_output, values, fn):
    """Return places for gradients: of S and each token's coefficients if it reads; of b' and f if it writes."""
    *tokens, n, _ = grad_streams.shape
    results = []
    if values is not None:
        row = n * (n + 2) if fn is None else 2 * n * (n + 2) + 2
        results.append(grad_streams.new_empty(grad_streams.shape))
        results.append(grad_streams.new_empty((*tokens, row), dtype=torch.float32))
    if branch_output is not None:
        results.append(grad_streams.new_empty((*tokens, n), dtype=torch.float32))
        results.append(branch_output.new_empty(branch_output.shape))
    return results


@operator(f"{_NAMESPACE}::step_backward", _backward_results)
def _step_backward(
    streams: torch.Tensor | None,
    written: torch.Tensor | None,
    beta: torch.Tensor | None,
    branch_output: torch.Tensor | None,
    fn: torch.Tensor | None,
    offset: torch.Tensor | None,
    alpha_scale: torch.Tensor | None,
    beta_scale: torch.Tensor | None,
    values: torch.Tensor | None,
    centred: bool,
    tanh: bool,
    grad_streams: torch.Tensor,
    grad_input: torch.Tensor | None,
    grad_beta: torch.Tensor | None,
) -> list[torch.Tensor]:
    refuse_shape(branch_output, grad_streams)
    refuse_shape(grad_input, grad_streams)
    results = _backward_results(grad_streams, branch_output, values, fn)
    if grad_streams.numel() == 0:
        return results
    new_grad_streams, grads = (None, None) if values is None else results[:2]
    of_beta, of_output = (None, None) if branch_output is None else results[-2:]
    h, *h_strides = token_rows(streams, 2)
    f, *f_strides = token_rows(branch_output, 1)
    of_h, *of_h_strides = token_rows(grad_streams, 2)
    of_x, *of_x_strides = token_rows(grad_input, 1)
    n, size = grad_streams.shape[-2:]
    with on_device_of(of_h):
        _backward[(of_h.numel() // (n * size),)](
            h, *h_strides, _dense(written), _row_stride(written), _dense(beta), f, *f_strides, of_h,
            fn, offset, alpha_scale, beta_scale, _dense(values), _row_stride(values),
            of_h, *of_h_strides, of_x, *of_x_strides, _dense(grad_beta), new_grad_streams, grads, of_beta, of_output,
            size, **_sizes(n, size), WRITES=f is not None, READS=values is not None, DYNAMIC=fn is not None,
            OFFSET=offset is not None, CENTRED=centred, TANH=tanh,
        )  # fmt: skip
    return results


def _parameter_results(streams, alpha_fn, beta_fn, weight, bias):
    """Return places for the gradients of static A, b and scales together, of `fn` in two, of the norm's parameters."""
    n = streams.shape[-2]
    of_static = beta_fn.new_empty(n * (n + 2) + 2)
    return [of_static, *(x.new_empty(x.shape) for x in (alpha_fn, beta_fn, weight, bias) if x is not None)]


@operator(f"{_NAMESPACE}::parameters_backward", _parameter_results)
def _parameters_backward(
    streams: torch.Tensor,
    written: torch.Tensor | None,
    beta: torch.Tensor | None,
    branch_output: torch.Tensor | None,
    values: torch.Tensor,
    grads: torch.Tensor,
    alpha_fn: torch.Tensor,
    beta_fn: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    centred: bool,
) -> list[torch.Tensor]:
    refuse_shape(branch_output, streams)
    results = _parameter_results(streams, alpha_fn, beta_fn, weight, bias)
    n, size = streams.shape[-2:]
    count = streams.numel() // (n * size)
    if count == 0:
        return [result.zero_() for result in results]
    h, *h_strides = token_rows(streams, 2)
    f, *f_strides = token_rows(branch_output, 1)
    sizes, total_sizes, row = _parameter_sizes(n, size), _total_sizes(n, size), 2 * n * (n + 2) + 2
    tokens_a_chunk = -(-count // _PARAMETER_CHUNKS)
    chunks = -(-count // tokens_a_chunk)
    of_static, of_alpha_fn, of_beta_fn, *of_norm = results
    of_fn, of_others = grads.new_empty((chunks, n + 2, size)), grads.new_empty((chunks, row))
    rounding = h if f is None or f.dtype == h.dtype else h.new_empty(0, dtype=_written_dtype(h, f))
    with on_device_of(h):
        _parameters[-(-size // sizes["BLOCK"]), chunks](
            h, *h_strides, _dense(written), _row_stride(written), _dense(beta), f, *f_strides, rounding,
            values, _row_stride(values), grads, of_fn, of_others, count, tokens_a_chunk, size, **sizes,
            WRITES=f is not None, CENTRED=centred,
        )  # fmt: skip
        _total[(-(-size // total_sizes["BLOCK"]),)](
            of_fn, of_others, _dense(alpha_fn), _dense(beta_fn), weight, bias, of_static, of_alpha_fn,
            of_beta_fn, of_norm[0] if weight is not None else None, of_norm[-1] if bias is not None else None,
            chunks, size, **total_sizes,
            WEIGHT=weight is not None, OFFSET=bias is not None,
        )  # fmt: skip
    return results
