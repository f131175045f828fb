# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Steps of hyper-connections, with a backward of their own that keeps little and passes over the streams few times.

A *step* goes from one branch to the next: the depth connection of a sub-layer, then the width connection of the one
after it. Either half may be absent. For one token, in the letters of `hyper_connections.py`,

    write   H = A_r'^T S + b' (outer) f       S, A', b': the streams and coefficients that the branch before read
    read    z = norm(H) @ fn                  f: its output
            [A | b] = static + scale * tanh(z + offset)
            x = A_m^T H

The mixed streams A_r^T H are never made: a step hands on H with its coefficients, and the next step mixes while it
writes. So a step receives the gradient of A_r^T H for the streams that it hands on. For S it returns the gradient of
A_r'^T S. Streams thereby have one gradient, not a sum of two. The backward keeps S, f and a few values a token for the
coefficients, and computes H again.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .computing import chosen_implementation, needs_autograd, uses_matrix_products
from .connection import Streams, Writer, as_new_output, broadcast_output, without_autocast
from .hc_torch import (
    BY_MATRIX_PRODUCTS,
    BY_SUMS,
    CoefficientParameters,
    ConnectionParameters,
    Read,
    StepFunctions,
    gradients_by_autograd,
)

MAX_TRITON_VALUES = 2**15  # of a token's streams, N and D padded to powers of two: more don't fit into registers


@dataclass(eq=False)
class UnwrittenStreams(Streams):
    """Residual streams to which the next step writes the output of the branch before.

    values: S.
    coefficients, branch_output: A', b' and f to write with; see `StepCarry`.
    """

    coefficients: torch.Tensor
    branch_output: torch.Tensor

    def written(self) -> torch.Tensor:
        """Return H, `[B, S, N, D]`."""
        with without_autocast(self.values):
            (values,) = step(self)
        return values


@dataclass(eq=False)
class StepCarry:
    """The carry of a width connection that is part of a step.

    streams: H, `[B, S, N, D]`, with the gradient of A_r^T H.
    coefficients: `[B, S, N, N+2]`, or `[N, N+2]` when static; float32 (float64 for float64 streams).
    """

    streams: torch.Tensor
    coefficients: torch.Tensor

    def write(self, branch_output: torch.Tensor) -> Streams:
        """Return the next streams, to which the next step writes a branch output `[B, S, D]`."""
        *tokens, _, size = self.streams.shape
        return UnwrittenStreams(self.streams, self.coefficients, broadcast_output(branch_output, (*tokens, size)))


def read_by_step(streams: Streams, parameters: ConnectionParameters) -> tuple[torch.Tensor, Writer]:
    """Return the branch input `[B, S, D]` and the carry of a step that reads, after it has written."""
    if chosen_implementation(streams.values, _run_one, MAX_TRITON_VALUES) == "triton":
        from .hc_triton import read_by_kernels

        return read_by_kernels(streams, parameters)
    if not isinstance(streams, UnwrittenStreams):  # written by another implementation
        streams = Streams(streams.written())
    written, branch_input, coefficients = step(streams, parameters.folded())
    return branch_input, StepCarry(written, coefficients)


def step(streams: Streams, parameters: CoefficientParameters | None = None) -> tuple[torch.Tensor, ...]:
    """Return H and, when there are parameters to read it by, the branch input `[B, S, D]` and the coefficients."""
    write = (streams.coefficients, streams.branch_output) if isinstance(streams, UnwrittenStreams) else (None, None)
    if not torch.is_grad_enabled() or torch.jit.is_tracing():  # a trace can't hold a Function
        return _outputs(*_step_functions(streams.values.device).step_forward(streams.values, *write, parameters))
    tensors = (None,) * 6 if parameters is None else parameters[:6]
    settings = None if parameters is None else parameters[6:]
    return _Step.apply(settings, streams.values, *write, *tensors)


def _outputs(streams: torch.Tensor, read: Read | None) -> tuple[torch.Tensor, ...]:
    return (streams,) if read is None else (streams, read.branch_input, read.coefficients)


def _step_functions(device: torch.device) -> StepFunctions:
    return BY_MATRIX_PRODUCTS if uses_matrix_products(device) else BY_SUMS


def _run_one(device: torch.device) -> None:
    """Read small streams by the kernels."""
    from .hc_triton import read_by_kernels

    parameters = ConnectionParameters(torch.zeros(2, 3, device=device), torch.zeros(2, device=device))
    read_by_kernels(Streams(torch.zeros(1, 1, 2, 16, device=device)), parameters)


class _Step(torch.autograd.Function):
    """A step. It returns the streams that it hands on and, when it reads, the branch input and the coefficients."""

    @staticmethod
    def forward(ctx, settings, streams, coefficients, branch_output, *tensors):
        ctx.settings = settings
        parameters = None if settings is None else CoefficientParameters(*tensors, *settings)
        functions = _step_functions(streams.device)
        next_streams, read = functions.step_forward(streams, coefficients, branch_output, parameters)
        if coefficients is None:
            next_streams = streams.view_as(streams)
        # writing alone needs no streams in its backward
        saved_streams = None if read is None else streams
        ctx.save_for_backward(saved_streams, coefficients, branch_output, *tensors, *(read or ())[1:])
        return tuple(map(as_new_output, _outputs(next_streams, read)))

    @staticmethod
    def backward(ctx, grad_streams, grad_input=None, grad_coefficients=None):
        with without_autocast(grad_streams):
            if needs_autograd():
                grads = grad_streams, grad_input, grad_coefficients
                return None, *gradients_by_autograd(ctx.settings, ctx.saved_tensors[:9], grads)
            streams, coefficients, branch_output, *saved = ctx.saved_tensors
            parameters, read, grad_beta = None, None, None
            if ctx.settings is not None:
                parameters, read = CoefficientParameters(*saved[:6], *ctx.settings), Read(None, *saved[6:])
                grad_beta = None if parameters.fn is None else grad_coefficients[..., -1]
            step_backward = _step_functions(grad_streams.device).step_backward
            arguments = streams, coefficients, branch_output, parameters, read, grad_streams, grad_input, grad_beta
            grads = step_backward(*arguments, ctx.needs_input_grad[_FN])
            of_parameters = (None,) * 6
            if parameters is not None:
                of_parameters = grads.parameters[:6]
                if parameters.fn is None:  # then b has no token dimensions, nor has its gradient
                    of_parameters = of_parameters[0], grad_coefficients[:, -1], *of_parameters[2:]
            of_coefficients = None if coefficients is None else _grad_of_written(grads.written_beta, coefficients)
        return None, grads.streams, of_coefficients, grads.branch_output, *of_parameters


_FN = 6  # the place of `fn` among the arguments of `_Step.forward` after ctx


def _grad_of_written(grad_beta: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """Return the gradient of the coefficients that a step writes with, through b alone.

    The gradient of A_r goes through the streams.
    """
    if coefficients.dim() == 2:
        grad_beta = grad_beta.flatten(0, -2).sum(0)
    return F.pad(grad_beta.unsqueeze(-1), (coefficients.shape[-1] - 1, 0))
