# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Hyper-connections with a backward of their own, which keeps little and passes over the streams few times.

A *step* goes from one branch to the next: the depth connection of a sub-layer, then the width connection of the one
after it. Either half may be absent. For one token, in the letters of `hyper_connections.py`,

    write   H = A_r'^T S + b' (outer) f       S, A', b': the streams and coefficients that the branch before read
    read    z = norm(H) @ fn                  f: its output
            [A | b] = static + scale * tanh(z + offset)
            x = A_m^T H

The mixed streams A_r^T H are never made: a step hands on H with its coefficients, and the next one mixes while it
writes. So the gradient that a step receives for the streams it hands on is that of A_r^T H, and the one it returns for
S is that of A_r'^T S. Streams thereby have one gradient, not a sum of two. What is kept for the backward is S, f and a
few values a token for the coefficients; H is computed again.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional as F

from .computing import gradients, implementation, needs_autograd, uses_matrix_products
from .connection import Streams, of_every_token, returned, without_autocast, without_overflow
from .hc_torch import BY_MATRIX_PRODUCTS, BY_SUMS, CoefficientParameters, Kernels, Read

MAX_TRITON_VALUES = 2**15  # of a token's streams, N and D padded to powers of two: more don't fit into registers


@dataclass(eq=False)
class UnwrittenStreams(Streams):
    """Residual streams to which the next step writes what the branch before adds.

    values: S.
    coefficients, branch_output: A', b' and f to write with; see `StepCarry`.
    """

    coefficients: torch.Tensor
    branch_output: torch.Tensor

    def written(self) -> torch.Tensor:
        """H, `[B, S, N, D]`."""
        with without_autocast(self.values):
            (values,) = step(self)
        return values


@dataclass(eq=False)
class StepCarry:
    """What a width connection leaves for its branch's output.

    streams: H, `[B, S, N, D]`, whose gradient is that of A_r^T H.
    coefficients: `[B, S, N, N+2]`, or `[N, N+2]` when static; float32 (float64 for float64 streams).
    """

    streams: torch.Tensor
    coefficients: torch.Tensor

    def write(self, branch_output: torch.Tensor) -> Streams:
        """The next streams, to which the next step writes a branch output `[B, S, D]`."""
        *tokens, _, size = self.streams.shape
        return UnwrittenStreams(self.streams, self.coefficients, of_every_token(branch_output, (*tokens, size)))


def step(streams: Streams, parameters: CoefficientParameters | None = None) -> tuple[torch.Tensor, ...]:
    """H and, when there are parameters to read it by, the branch input `[B, S, D]` and the coefficients."""
    written_with = (streams.coefficients, streams.branch_output) if isinstance(streams, UnwrittenStreams) else None
    tensors = streams.values, *(written_with or (None, None))
    name = implementation(streams.values, _run_one, MAX_TRITON_VALUES)
    if not torch.is_grad_enabled() or torch.jit.is_tracing():  # which can't hold a Function
        handed_on, result = _kernels(name, streams.values.device).step_forward(*tensors, parameters)
        return (handed_on,) if result is None else (handed_on, result.branch_input, result.coefficients)
    read_with = (None,) * 6 if parameters is None else parameters[:6]
    settings = None if parameters is None else parameters[6:]
    return _Step.apply(name, settings, *tensors, *read_with)


def _kernels(name: str, device: torch.device) -> Kernels:
    """What computes steps on a device."""
    if name == "triton":
        from .hc_triton import KERNELS

        return KERNELS
    return BY_MATRIX_PRODUCTS if uses_matrix_products(device) else BY_SUMS


def _run_one(device: torch.device) -> None:
    """Read small streams by the kernels."""
    parameters = CoefficientParameters(torch.zeros(2, 3, device=device), torch.zeros(2, device=device))
    _kernels("triton", device).step_forward(torch.zeros(1, 1, 2, 16, device=device), None, None, parameters)


class _Step(torch.autograd.Function):
    """A step. It returns the streams that it hands on and, when it reads, the branch input and the coefficients."""

    @staticmethod
    def forward(ctx, name, settings, streams, coefficients, branch_output, *tensors):
        ctx.name, ctx.settings = name, settings
        parameters = None if settings is None else CoefficientParameters(*tensors, *settings)
        handed_on, result = _kernels(name, streams.device).step_forward(
            streams, coefficients, branch_output, parameters
        )
        if coefficients is None:
            handed_on = streams.view_as(streams)
        # writing alone needs no streams in its backward
        kept = None if parameters is None else streams
        ctx.save_for_backward(kept, coefficients, branch_output, *tensors, *(result or ())[1:])
        outputs = (handed_on,) if result is None else (handed_on, result.branch_input, result.coefficients)
        return tuple(map(returned, outputs))

    @staticmethod
    def backward(ctx, grad_streams, grad_input=None, grad_read_coefficients=None):
        streams, coefficients, branch_output, *saved = ctx.saved_tensors
        tensors, values = saved[:6], saved[6:]
        if needs_autograd():
            grads = (grad_streams, grad_input, grad_read_coefficients)
            with without_autocast(grad_streams):
                return None, None, *_by_autograd(ctx.settings, (streams, coefficients, branch_output, *tensors), grads)
        parameters = None if ctx.settings is None else CoefficientParameters(*tensors, *ctx.settings)
        not_kept: Any = None  # what the branch read
        result = None if parameters is None else Read(not_kept, *values)
        is_dynamic = parameters is not None and parameters.fn is not None
        with without_autocast(grad_streams):
            grads = _kernels(ctx.name, grad_streams.device).step_backward(
                streams,
                coefficients,
                branch_output,
                parameters,
                result,
                grad_streams,
                grad_input,
                grad_read_coefficients[..., -1] if is_dynamic else None,
                ctx.needs_input_grad[_FN],
            )
            of_written = None if coefficients is None else _of_written(grads.written_beta, coefficients)
        of_parameters = [None] * 6
        if parameters is not None:
            static, fn, offset, scale = grads.parameters
            of_beta = static[:, -1] if is_dynamic else grad_read_coefficients[:, -1]
            of_scales = (scale[:-1].sum(0, keepdim=True), scale[-1:]) if is_dynamic else (None, None)
            of_parameters = [static[:, :-1], of_beta, fn, offset, *of_scales]
        return None, None, grads.streams, of_written, grads.branch_output, *of_parameters


def _by_autograd(
    settings: tuple | None, tensors: tuple[torch.Tensor | None, ...], grads: tuple[torch.Tensor | None, ...]
) -> list[torch.Tensor | None]:
    """The gradients of a step's tensors, by autograd."""
    of_streams, of_input, of_coefficients = grads
    if settings is None:
        _, *written = tensors[:3]
        of_written = gradients(lambda *written: (write(*written),), written, (of_streams,))
        return [of_streams, *of_written, *(None,) * 6]

    assert of_coefficients is not None

    def step(streams, coefficients, branch_output, *of_parameters):
        return write_and_read(streams, coefficients, branch_output, CoefficientParameters(*of_parameters, *settings))

    return gradients(step, tensors, (of_streams, of_input, of_coefficients[..., -1]))


_FN = 7  # the place of `fn` among the arguments of a step


def _of_written(grad_beta: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """The gradient of the coefficients that a step writes with: through b, the rest goes through the streams."""
    if coefficients.dim() == 2:
        grad_beta = grad_beta.flatten(0, -2).sum(0)
    return F.pad(grad_beta.unsqueeze(-1), (coefficients.shape[-1] - 1, 0))


def write(coefficients: torch.Tensor, branch_output: torch.Tensor) -> torch.Tensor:
    """What a branch adds to the streams: b (outer) f, `[B, S, N, D]`, in the dtype of the coefficients."""
    output = without_overflow(branch_output.to(coefficients.dtype), branch_output.dtype)
    return coefficients[..., -1:] * output.unsqueeze(-2)


def write_and_read(
    streams: torch.Tensor,
    coefficients: torch.Tensor | None,
    branch_output: torch.Tensor | None,
    parameters: CoefficientParameters,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A step that reads, in the letters of `hyper_connections.py`: A_r^T H, x and b.

    The gradient of `streams` is that of A_r'^T S when something is written.
    """
    if coefficients is not None:
        dtype = torch.promote_types(streams.dtype, branch_output.dtype)
        streams = (Mixed.apply(streams, coefficients) + write(coefficients, branch_output)).to(dtype)
    values, used = streams.to(parameters.static_alpha.dtype), parameters.static()
    if parameters.fn is not None:
        centred = values - values.mean(-1, keepdim=True) if parameters.centred else values
        normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + parameters.eps)
        used = used + parameters.scale() * parameters.squash(normed @ parameters.fn.transpose(0, 1))
    return mixed(used, values), weighted(used[..., 0], values).to(streams.dtype), used[..., -1]


def mixed(coefficients: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """A_r^T H, `[B, S, N, D]`."""
    return torch.stack([weighted(column, values) for column in coefficients[..., 1:-1].unbind(-1)], dim=-2)


def weighted(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """The sum of streams `[B, S, N, D]` with weights `[B, S, N]` or `[N]`: `[B, S, D]`."""
    return (weights.unsqueeze(-1) * values).sum(-2)


class Mixed(torch.autograd.Function):
    """A_r^T H of streams and coefficients, as a variable of its own: a step's gradient of H is that of A_r^T H."""

    generate_vmap_rule = True

    @staticmethod
    def forward(streams, coefficients):
        return mixed(coefficients, streams.to(coefficients.dtype))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad, None
