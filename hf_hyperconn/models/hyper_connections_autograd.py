# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Derivatives that a hand-written backward does not have: those of gradients, and those of transforms.

A backward of our own computes gradients from values that the forward saved, so what autograd records of it is not the
derivative of these gradients. When a graph of the backward is asked for, gradients are computed here instead, by
autograd through the algebra written out, from the inputs alone: such a graph is right to any order. Under the
transforms of `torch.func` and in forward-mode differentiation, connections take the plain way from the start.
"""

from collections.abc import Callable, Sequence

import torch
from torch.autograd import forward_ad

from .hyper_connections_types import CoefficientParameters, without_overflow

# none of these is public; without them a transform meets the functions of our own, and says that it can't pass
_interpreters = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None)
_has_dispatch_key = getattr(torch._C, "_dispatch_tls_is_dispatch_key_included", lambda key: False)


@torch.compiler.assume_constant_result  # a compiler guards what is asked here by itself
def is_transformed() -> bool:
    """Whether a transform of `torch.func`, or forward-mode differentiation, is under way."""
    return _interpreters() is not None or getattr(forward_ad, "_current_level", -1) >= 0


def needs_autograd() -> bool:
    """Asked inside a backward: whether a graph of it is recorded, or it runs for a batch of gradients at once."""
    if torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() or is_transformed() or _has_dispatch_key("VmapMode")


def returned(tensor: torch.Tensor) -> torch.Tensor:
    """What the forward of a function of our own returns: the tensor; to a compiler a view of it.

    Before torch 2.12 Dynamo loses the gradient of what an operation in place, or one that does nothing, returns.
    """
    return tensor.view_as(tensor) if torch.compiler.is_compiling() else tensor


def gradients(
    function: Callable[..., Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor | None],
    grads: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """The gradients of `tensors`, each None where none is needed, from those of what `function` returns for them.

    They have a graph of their own when gradients are enabled.
    """
    records = torch.is_grad_enabled()
    with torch.enable_grad():
        # so that a gradient does not go on to tensors which others were made of
        inputs = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
        outputs = function(*inputs)
        pairs = [(made, grad.to(made.dtype)) for made, grad in zip(outputs, grads, strict=True) if made.requires_grad]
        if not pairs:
            return [None] * len(inputs)
        made, of_made = zip(*pairs, strict=True)
        wanted = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
        found = iter(torch.autograd.grad(made, wanted, of_made, create_graph=records, allow_unused=True))
    return [next(found) if tensor is not None and tensor.requires_grad else None for tensor in inputs]


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
    """A step that reads, in the letters of `hyper_connections_step.py`: A_r^T H, x and b.

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
