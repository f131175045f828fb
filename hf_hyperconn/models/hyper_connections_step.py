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

import math
import os
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional as F
from transformers.utils import logging

from .hyper_connections_autograd import gradients, needs_autograd, returned, write, write_and_read
from .hyper_connections_torch import BY_MATRIX_PRODUCTS, BY_SUMS, uses_matrix_products
from .hyper_connections_types import CoefficientParameters, Kernels, Read, of_every_token

logger = logging.get_logger(__name__)

IMPLEMENTATIONS = ("auto", "torch", "triton")
MAX_TRITON_STREAMS = 8
MAX_TRITON_VALUES = 2**15  # of a token's streams, N and D padded to powers of two: more don't fit into registers
_TRITON_IS_INSTALLED = find_spec("triton") is not None
_TRITON_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
_asked = "auto"
_logged: set[str] = set()
_TRIES = 3  # of a kernel that fails, before it counts as one that never runs
_failures: dict[torch.device, list[str]] = {}  # of kernels that were tried; none of those that ran


def set_hc_implementation(name: str) -> None:
    """Choose what computes static, dynamic and manifold-constrained hyper-connections from here on, in the process.

    name: "torch"; "triton", the fused kernels, which need a GPU (or `TRITON_INTERPRET=1`) and never fall back; or
        "auto", the kernels on a GPU. The environment variable `HF_HYPERCONN_IMPLEMENTATION` sets it at start.

    Kernels that have failed are tried again from here on.

    Raises `ValueError` for another name, `RuntimeError` for "triton" where Triton is not installed.
    """
    global _asked
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation {name!r} was asked for; accepted are {', '.join(map(repr, IMPLEMENTATIONS))}."
        )
    if name == "triton" and not _TRITON_IS_INSTALLED:
        raise RuntimeError(
            'implementation "triton" was asked for, but Triton is not installed. Run: pip install triton'
        )
    _asked = name
    _failures.clear()


set_hc_implementation(os.environ.get("HF_HYPERCONN_IMPLEMENTATION", "auto"))


def implementation(streams: torch.Tensor, most_values: int | None = None) -> str:
    """What computes a connection on `streams`: "torch" or "triton".

    most_values: that its kernels take of a token's streams, padded as in `MAX_TRITON_VALUES`; None for any number.

    Raises `RuntimeError` when "triton" was asked for and can't run on them.
    """
    if _asked == "torch":
        return "torch"
    on_gpu = streams.device.type == "cuda"
    obstacle = _triton_obstacle(streams, on_gpu or (_asked == "triton" and _TRITON_INTERPRETS), most_values)
    if _asked == "triton" and obstacle is not None:
        raise RuntimeError(f'implementation "triton" was asked for, but {obstacle}. Use "auto" or "torch" there.')
    taken = "triton" if obstacle is None else "torch"
    message = f"hyper-connections are computed by {taken}{f', because {obstacle}' if obstacle else ''}."
    if not torch.compiler.is_compiling() and message not in _logged:
        _logged.add(message)
        log = logger.warning if on_gpu and obstacle else logger.info
        log(message)
    return taken


def _triton_obstacle(streams: torch.Tensor, has_device: bool, most_values: int | None) -> str | None:
    if not _TRITON_IS_INSTALLED:
        return "Triton is not installed"
    if not has_device:
        return f"the streams are on {streams.device.type}, not on a GPU"
    if streams.dtype == torch.float64:
        return "the streams are float64"
    n, size = (int(each) for each in streams.shape[-2:])  # tensors, while `torch.jit.trace` looks on
    if n > MAX_TRITON_STREAMS:
        return f"there are {n} streams, more than {MAX_TRITON_STREAMS}"
    padded = [1 << (each - 1).bit_length() for each in (n, size)]
    if most_values is not None and math.prod(padded) > most_values:
        return f"{n} streams of {size} values, padded to {padded[0]} x {padded[1]}, are more than {most_values}"
    return _why_kernels_fail(streams.device) if streams.device.type == "cuda" else None


@torch.compiler.assume_constant_result
def _why_kernels_fail(device: torch.device) -> str | None:
    """What a small kernel on a GPU fails with, as where there is no C compiler or the GPU is old; None if it runs.

    What fails once may pass: it is tried again. While a CUDA graph is captured nothing can be tried.
    """
    if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
        return None
    failures = _failures.get(device)
    if failures is None or 0 < len(failures) < _TRIES:
        failure = _try_kernels(device)
        _failures[device] = failures = [] if failure is None else [*(failures or ()), failure]
    return failures[-1] if failures else None


def _try_kernels(device: torch.device) -> str | None:
    from torch.utils._python_dispatch import _disable_current_modes  # torch's own: a folder must load without it

    try:
        from .hyper_connections_triton_operators import KERNELS

        with _disable_current_modes(), torch.no_grad():  # an exported program would hold what it runs
            alpha, beta = torch.zeros(2, 3, device=device), torch.zeros(2, device=device)
            KERNELS.step_forward(
                torch.zeros(1, 1, 2, 16, device=device), None, None, CoefficientParameters(alpha, beta)
            )
    except torch.OutOfMemoryError:  # which may pass
        raise
    except Exception as error:  # of a driver, a compiler, or Triton
        first_line = next(iter(str(error).splitlines()), "")
        return f"a kernel failed on {device} ({type(error).__name__}: {first_line}); set_hc_implementation tries again"
    return None


@dataclass(eq=False)
class Streams:
    """Residual streams on their way to a connection; what the branch before adds to them may be left to be written.

    values: H, `[B, S, N, D]`; where something is to be written, S.
    coefficients, branch_output: A', b' and f to write with; see `StepCarry`.
    """

    values: torch.Tensor
    coefficients: torch.Tensor | None = None
    branch_output: torch.Tensor | None = None

    def __len__(self) -> int:
        """B, as of a tensor: PEFT asks for it."""
        return len(self.values)

    def written(self) -> torch.Tensor:
        """H, `[B, S, N, D]`."""
        if self.coefficients is None:
            return self.values
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
        return Streams(self.streams, self.coefficients, of_every_token(branch_output, (*tokens, size)))


def step(streams: Streams, parameters: CoefficientParameters | None = None) -> tuple[torch.Tensor, ...]:
    """H and, when there are parameters to read it by, the branch input `[B, S, D]` and the coefficients."""
    tensors = streams.values, streams.coefficients, streams.branch_output
    name = implementation(streams.values, MAX_TRITON_VALUES)
    if not torch.is_grad_enabled() or torch.jit.is_tracing():  # which can't hold a Function
        handed_on, result = _kernels(name, streams.values.device).step_forward(*tensors, parameters)
        return (handed_on,) if result is None else (handed_on, result.branch_input, result.coefficients)
    read_with = (None,) * 6 if parameters is None else parameters[:6]
    settings = None if parameters is None else parameters[6:]
    return _Step.apply(name, settings, *tensors, *read_with)


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager:
    """A context in which operations on `tensor` keep the dtypes that they are given."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # which raises where there is no autocast
        return nullcontext()
    return torch.autocast(device, enabled=False)


def _kernels(name: str, device: torch.device) -> Kernels:
    """What computes steps on a device."""
    if name == "triton":
        from .hyper_connections_triton_operators import KERNELS

        return KERNELS
    return BY_MATRIX_PRODUCTS if uses_matrix_products(device) else BY_SUMS


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
