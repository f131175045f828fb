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

import os
import weakref
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from transformers.utils import logging

from .hyper_connections_autograd import gradients, needs_autograd, write, write_and_read
from .hyper_connections_torch import BY_MATRIX_PRODUCTS, BY_SUMS, Kernels, Read, Reader, uses_matrix_products

logger = logging.get_logger(__name__)

IMPLEMENTATIONS = ("auto", "torch", "triton")
MAX_TRITON_STREAMS = 8
_TRITON_IS_INSTALLED = find_spec("triton") is not None
_TRITON_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
_asked = "auto"
_logged: set[str] = set()
_failures: dict[torch.device, str | None] = {}  # of kernels that were tried


def set_hc_implementation(name: str) -> None:
    """Choose what computes static, dynamic and manifold-constrained hyper-connections from here on, in the process.

    name: "torch"; "triton", the fused kernels, which need a GPU (or `TRITON_INTERPRET=1`) and never fall back; or
        "auto", the kernels on a GPU. The environment variable `HF_HYPERCONN_IMPLEMENTATION` sets it at start.

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


set_hc_implementation(os.environ.get("HF_HYPERCONN_IMPLEMENTATION", "auto"))


def implementation(streams: torch.Tensor) -> str:
    """What computes a step on `streams`: "torch" or "triton".

    Raises `RuntimeError` when "triton" was asked for and can't run on them.
    """
    if _asked == "torch":
        return "torch"
    on_gpu = streams.device.type == "cuda"
    obstacle = _triton_obstacle(streams, on_gpu or (_asked == "triton" and _TRITON_INTERPRETS))
    if _asked == "triton" and obstacle is not None:
        raise RuntimeError(f'implementation "triton" was asked for, but {obstacle}. Use "auto" or "torch" there.')
    taken = "triton" if obstacle is None else "torch"
    if not torch.compiler.is_compiling() and taken not in _logged:
        _logged.add(taken)
        log = logger.warning if on_gpu and obstacle else logger.info
        log(f"hyper-connections are computed by {taken}{f', because {obstacle}' if obstacle else ''}.")
    return taken


def _triton_obstacle(streams: torch.Tensor, has_device: bool) -> str | None:
    if not _TRITON_IS_INSTALLED:
        return "Triton is not installed"
    if not has_device:
        return f"the streams are on {streams.device.type}, not on a GPU"
    if streams.dtype == torch.float64:
        return "the streams are float64"
    if streams.shape[-2] > MAX_TRITON_STREAMS:
        return f"there are {streams.shape[-2]} streams, more than {MAX_TRITON_STREAMS}"
    return _why_kernels_fail(streams.device) if streams.device.type == "cuda" else None


@torch.compiler.assume_constant_result
def _why_kernels_fail(device: torch.device) -> str | None:
    """What a small kernel on a GPU fails with, as where there is no C compiler or the GPU is old; None if it runs."""
    if device not in _failures:
        _failures[device] = _try_kernels(device)
    return _failures[device]


def _try_kernels(device: torch.device) -> str | None:
    from torch._subclasses.fake_tensor import unset_fake_temporarily  # torch's own: a folder must load without it

    try:
        from .hyper_connections_triton import KERNELS

        with unset_fake_temporarily(), torch.no_grad():
            alpha, beta = torch.zeros(2, 3, device=device), torch.zeros(2, device=device)
            KERNELS.step_forward(torch.zeros(1, 1, 2, 16, device=device), None, None, Reader(alpha, beta))
    except Exception as error:  # of a driver, a compiler, or Triton
        return f"a kernel failed on {device} ({type(error).__name__}: {next(iter(str(error).splitlines()), '')})"
    return None


class StepCarry(NamedTuple):
    """What a width connection leaves for the depth connection of the same sub-layer.

    streams: H, `[B, S, N, D]`, whose gradient is that of A_r^T H.
    coefficients: `[B, S, N, N+2]`, or `[N, N+2]` when static; float32 (float64 for float64 streams).
    origin: H as a backward can get it, kept or computed again; None when no stream is to be computed again.
    """

    streams: torch.Tensor
    coefficients: torch.Tensor
    origin: "torch.Tensor | Replay | None" = None


def read_streams(
    streams: torch.Tensor, reader: Reader, keeps_streams: bool | None = None
) -> tuple[torch.Tensor, StepCarry]:
    """A width connection: the branch input `[B, S, D]` of streams `[B, S, N, D]`, and the carry.

    keeps_streams: whether the backward keeps the streams or computes them again from the last kept ones; None when all
        are kept and nothing needs to be recorded.
    """
    if not torch.is_grad_enabled() or torch.compiler.is_compiling():
        keeps_streams = None
    replay = _replay_of(streams) if keeps_streams is False else None
    with nullcontext() if replay is None else _packed_as(replay, streams):
        handed_on, branch_input, coefficients = _step(streams, None, None, reader)
    origin = None if keeps_streams is None else (replay or streams.detach())
    return branch_input, StepCarry(handed_on, coefficients, origin)


def write_streams(carry: StepCarry, branch_output: torch.Tensor) -> torch.Tensor:
    """A depth connection: the next streams `[B, S, N, D]`."""
    (streams,) = _step(carry.streams, carry.coefficients, branch_output, None)
    if carry.origin is not None:
        streams.hc_replay = Replay(carry, branch_output)
        if streams.grad_fn is not None:
            # the graph must not keep what is computed again, the streams and what is saved in their place do
            streams.grad_fn.hc_replay = weakref.ref(streams.hc_replay)
    return streams


def write_and_read_streams(
    carry: StepCarry, branch_output: torch.Tensor, reader: Reader
) -> tuple[torch.Tensor, StepCarry]:
    """A depth connection and the width connection of the next sub-layer: its branch input and carry."""
    with _packed_as(carry.origin, carry.streams) if isinstance(carry.origin, Replay) else nullcontext():
        handed_on, branch_input, coefficients = _step(carry.streams, carry.coefficients, branch_output, reader)
    origin = None if carry.origin is None else Replay(carry, branch_output)
    return branch_input, StepCarry(handed_on, coefficients, origin)


class Replay:
    """Streams to be computed again, from the carry and the branch output that they were written with."""

    def __init__(self, carry: StepCarry, branch_output: torch.Tensor):
        self.origin, self.coefficients = carry.origin, carry.coefficients.detach()
        self.branch_output = branch_output.detach()
        self.kernels = _kernels(implementation(carry.streams), carry.streams.device)
        self.streams: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        """The streams, bit for bit. Those on the way from the last kept ones stay for the sub-layers before."""
        chain = [self]
        while chain[-1].streams is None and isinstance(chain[-1].origin, Replay):
            chain.append(chain[-1].origin)
        for step in reversed(chain):
            if step.streams is None:
                before = step.origin.streams if isinstance(step.origin, Replay) else step.origin
                step.streams, _ = step.kernels.step_forward(before, step.coefficients, step.branch_output, None)
        return self.streams


def _replay_of(streams: torch.Tensor) -> Replay | None:
    """How to compute streams again that were written last, also when FSDP2 has handed them on as new tensors."""
    if hasattr(streams, "hc_replay"):
        return streams.hc_replay
    node, place = streams.grad_fn, streams.output_nr
    while type(node).__name__ == "RegisterPostBackwardFunctionBackward":
        node, place = node.next_functions[place]
    replay = getattr(node, "hc_replay", None)
    return None if replay is None else replay()


def _packed_as(replay: Replay, streams: torch.Tensor) -> saved_tensors_hooks:
    """Hooks that save `replay` in the place of `streams`."""
    # the hooks live as long as the graph, the streams must not
    place = _place(streams)

    def pack(tensor: torch.Tensor) -> torch.Tensor | Replay:
        return replay if _place(tensor) == place else tensor

    return saved_tensors_hooks(pack, lambda packed: packed() if isinstance(packed, Replay) else packed)


def _place(tensor: torch.Tensor) -> tuple[int, int, torch.Size]:
    """Where a tensor is; unlike its address, also when it has no memory, on the meta device or fake."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape


def _step(
    streams: torch.Tensor, coefficients: torch.Tensor | None, branch_output: torch.Tensor | None, reader: Reader | None
) -> tuple[torch.Tensor, ...]:
    name = implementation(streams)
    if not torch.is_grad_enabled() or torch.jit.is_tracing():  # which can't hold a Function
        handed_on, result = _kernels(name, streams.device).step_forward(streams, coefficients, branch_output, reader)
        return (handed_on,) if result is None else (handed_on, result.branch_input, result.coefficients)
    tensors = (None,) * 6 if reader is None else reader[:6]
    settings = None if reader is None else reader[6:]
    return _Step.apply(name, settings, streams, coefficients, branch_output, *tensors)


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager:
    """A context in which operations on `tensor` keep the dtypes that they are given."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # which raises where there is no autocast
        return nullcontext()
    return torch.autocast(device, enabled=False)


def _kernels(name: str, device: torch.device) -> Kernels:
    """What computes steps on a device."""
    if name == "triton":
        from .hyper_connections_triton import KERNELS

        return KERNELS
    return BY_MATRIX_PRODUCTS if uses_matrix_products(device) else BY_SUMS


class _Step(torch.autograd.Function):
    """A step. It returns the streams that it hands on and, when it reads, the branch input and the coefficients."""

    @staticmethod
    def forward(ctx, name, settings, streams, coefficients, branch_output, *tensors):
        ctx.name, ctx.settings = name, settings
        reader = None if settings is None else Reader(*tensors, *settings)
        handed_on, result = _kernels(name, streams.device).step_forward(streams, coefficients, branch_output, reader)
        if coefficients is None:
            handed_on = streams.view_as(streams)
        # writing alone needs no streams in its backward
        kept = None if reader is None else streams
        ctx.save_for_backward(kept, coefficients, branch_output, *tensors, *(result or ())[1:])
        return (handed_on,) if result is None else (handed_on, result.branch_input, result.coefficients)

    @staticmethod
    def backward(ctx, grad_streams, grad_input=None, grad_read_coefficients=None):
        streams, coefficients, branch_output, *saved = ctx.saved_tensors
        tensors, values = saved[:6], saved[6:]
        if needs_autograd():
            grads = (grad_streams, grad_input, grad_read_coefficients)
            with without_autocast(grad_streams):
                return None, None, *_by_autograd(ctx.settings, (streams, coefficients, branch_output, *tensors), grads)
        reader = None if ctx.settings is None else Reader(*tensors, *ctx.settings)
        result = None if reader is None else Read(None, *values)
        is_dynamic = reader is not None and reader.fn is not None
        with without_autocast(grad_streams):
            grads = _kernels(ctx.name, grad_streams.device).step_backward(
                streams,
                coefficients,
                branch_output,
                reader,
                result,
                grad_streams,
                grad_input,
                grad_read_coefficients[..., -1] if is_dynamic else None,
                ctx.needs_input_grad[_FN],
            )
            of_written = None if coefficients is None else _of_written(grads.written_beta, coefficients)
        of_reader = [None] * 6
        if reader is not None:
            static, fn, offset, scale = grads.reader
            of_beta = static[:, -1] if is_dynamic else grad_read_coefficients[:, -1]
            of_scales = (scale[:-1].sum(0, keepdim=True), scale[-1:]) if is_dynamic else (None, None)
            of_reader = [static[:, :-1], of_beta, fn, offset, *of_scales]
        return None, None, grads.streams, of_written, grads.branch_output, *of_reader


def _by_autograd(
    settings: tuple | None, tensors: tuple[torch.Tensor | None, ...], grads: tuple[torch.Tensor | None, ...]
) -> list[torch.Tensor | None]:
    """The gradients of a step's tensors, by autograd."""
    of_streams, of_input, of_coefficients = grads
    if settings is None:
        _, *written = tensors[:3]
        of_written = gradients(lambda *written: (write(*written),), written, (of_streams,))
        return [of_streams, *of_written, *(None,) * 6]

    def step(streams, coefficients, branch_output, *of_reader):
        return write_and_read(streams, coefficients, branch_output, Reader(*of_reader, *settings))

    return gradients(step, tensors, (of_streams, of_input, of_coefficients[..., -1]))


_FN = 7  # the place of `fn` among the arguments of a step


def _of_written(grad_beta: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    """The gradient of the coefficients that a step writes with: through b, the rest goes through the streams."""
    if coefficients.dim() == 2:
        grad_beta = grad_beta.flatten(0, -2).sum(0)
    return F.pad(grad_beta.unsqueeze(-1), (coefficients.shape[-1] - 1, 0))
