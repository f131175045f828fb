# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Connections: a width connection before the branch of a sub-layer, and a depth connection after it.

All kinds of connections share them. Letters: B batch, S sequence, N residual streams, D hidden size; k
counts sub-layers from zero (attention of decoder layer i is k = 2i, its MLP is k = 2i + 1). A *branch* is norm +
attention, or norm + MLP. Equations are from Hyper-Connections (arXiv 2409.19606).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .connection_weights import WideModule

OVERFLOW = 2.0**100  # beyond the range of float16


class Written(Protocol):
    """Streams on their way to a connection, from its `take` or from a carry."""

    def written(self) -> torch.Tensor:
        """Return the streams, `[B, S, N, D]`."""


class Writer(Protocol):
    """The carry of any width connection."""

    def write(self, branch_output: torch.Tensor) -> Written:
        """Return the next streams, of a branch output `[B, S, D]`."""


@dataclass(eq=False)
class Streams:
    """Residual streams on their way to a connection.

    values: H, `[B, S, N, D]`.
    """

    values: torch.Tensor

    def __len__(self) -> int:
        """Return B, as a tensor does, for PEFT."""
        return len(self.values)

    def written(self) -> torch.Tensor:
        """Return H, `[B, S, N, D]`."""
        return self.values


@dataclass(eq=False)
class Carry:
    """The carry of a connection that mixes at once: mixed streams before the branch's output is added.

    mixed: H', the mixed streams, `[B, S, N, D]`, float32 (float64 for float64 streams).
    beta: b, the write weights, `[N]` or `[B, S, N]`, same dtype.
    dtype: the dtype of the streams.
    """

    mixed: torch.Tensor
    beta: torch.Tensor
    dtype: torch.dtype

    def write(self, branch_output: torch.Tensor) -> Streams:
        """Return the next streams, of a branch output `[B, S, D]`: the depth connection.

        Their dtype is the dtype of `streams + branch_output`.
        """
        dtype = torch.promote_types(self.dtype, branch_output.dtype)
        return Streams(self.added(clamp_infinities(branch_output.to(self.mixed.dtype), dtype)).to(dtype))

    def added(self, branch_output: torch.Tensor) -> torch.Tensor:
        """Return the next streams before they are rounded, `[B, S, N, D]`, of an output in their dtype. Eq. 5."""
        *tokens, _, size = self.mixed.shape
        return self.mixed + self.beta.unsqueeze(-1) * broadcast_output(branch_output, (*tokens, size)).unsqueeze(-2)


def expand_streams(hidden_states: torch.Tensor, hc_mult: int) -> torch.Tensor:
    """Repeat hidden states `[B, S, D]` into `hc_mult` equal streams, `[B, S, N, D]` (a view). Section 2.1."""
    return hidden_states.unsqueeze(-2).expand(*hidden_states.shape[:-1], hc_mult, hidden_states.shape[-1])


def reduce_streams(streams: torch.Tensor, readout: str = "mean") -> torch.Tensor:
    """Read hidden states `[B, S, D]` out of streams `[B, S, N, D]`, in the dtype of the streams.

    readout: "mean", which returns equal streams exactly, for every N; or "sum", the paper's, which hands N times the
    vector to the final norm.
    """
    values = streams.to(compute_dtype(streams.dtype))
    return (values.sum(-2) if readout == "sum" else stream_mean(values)).to(streams.dtype)


def stream_mean(streams: torch.Tensor) -> torch.Tensor:
    """Return the mean `[B, S, D]` of streams `[B, S, N, D]`; equal streams are their own mean, exactly."""
    first = streams[..., 0, :]
    return first + (streams - first.unsqueeze(-2)).mean(-2)


class Connection(WideModule):
    """The width connection before the branch of one sub-layer and the depth connection after it.

    hidden_size: D.
    hc_mult: N, at least 1.
    sub_layer: k.

    Parameters are float32 whatever the default dtype, and stay float32. The forward casts narrower ones up.
    """

    def __init__(self, hidden_size: int, hc_mult: int, sub_layer: int):
        super().__init__()
        self.hidden_size, self.hc_mult, self.sub_layer = hidden_size, hc_mult, sub_layer

    def expand_streams(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the first streams, `[B, S, N, D]`, of hidden states `[B, S, D]`."""
        return expand_streams(hidden_states, self.hc_mult)

    def reduce_streams(self, streams: torch.Tensor, readout: str) -> torch.Tensor:
        """Return the hidden states `[B, S, D]` of streams."""
        return reduce_streams(streams, readout)

    def read_and_mix(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the branch input `[B, S, D]` of streams `[B, S, N, D]`, in their dtype, and H' and b of `Carry`."""
        raise NotImplementedError

    def take(self, streams: torch.Tensor) -> Written:
        """Return streams `[B, S, N, D]` as the input of `forward`."""
        return Streams(streams)

    def forward(self, streams: Any) -> tuple[torch.Tensor, Writer]:
        """Return the branch input `[B, S, D]` and the carry: the width connection.

        It is a forward, so that hooks and wrappers of the module see it.

        streams: from `take`, or from the carry of the sub-layer before.
        """
        values = streams.written()
        with without_autocast(values):
            branch_input, mixed, beta = self.read_and_mix(values)
        return branch_input, self.carry(mixed, beta, values.dtype)

    def carry(self, mixed: torch.Tensor, beta: torch.Tensor, dtype: torch.dtype) -> Carry:
        """Return the carry that writes a branch's output to H', with b, as streams of a dtype."""
        return Carry(mixed, beta, dtype)

    def width_connection(self, streams: torch.Tensor) -> tuple[torch.Tensor, Writer]:
        """Return the results of `forward` for streams `[B, S, N, D]` as a tensor."""
        return self(self.take(streams))

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, hc_mult={self.hc_mult}, sub_layer={self.sub_layer}"


def broadcast_output(branch_output: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a branch output broadcast to `[B, S, D]`, as an addition would."""
    if not torch.jit.is_tracing() and branch_output.shape == shape:
        return branch_output
    return branch_output.expand(shape)


def clamp_infinities(branch_output: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a branch output in the compute dtype, whose products with 0 are 0, for streams of a dtype.

    Families that train in float16 clamp streams that overflow. Other streams must stay unchanged.
    """
    return branch_output.clamp(-OVERFLOW, OVERFLOW) if dtype == torch.float16 else branch_output


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype that streams of `dtype` are computed in: float32, or float64 for float64."""
    return dtype if dtype == torch.float32 else torch.promote_types(dtype, torch.float32)


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager:
    """Return a context in which operations on `tensor` keep their dtypes."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # which raises where there is no autocast
        return nullcontext()
    return torch.autocast(device, enabled=False)


def apply_recorded(function: type[torch.autograd.Function], *inputs: Any) -> torch.Tensor:
    """Return the output of a function with a backward of its own, which is left out where no gradient is recorded."""
    recorded = torch.is_grad_enabled() and any(
        isinstance(each, torch.Tensor) and each.requires_grad for each in inputs
    )
    if recorded and not torch.jit.is_tracing():  # a trace can't contain a Function
        return function.apply(*inputs)
    # Dynamo would call it with a context, as one without `setup_context`
    return function.forward(*inputs)


def as_new_output(tensor: torch.Tensor) -> torch.Tensor:
    """Return the output of an `autograd.Function`; under a compiler a view of it.

    Before torch 2.12 Dynamo loses the gradient of an output of an in-place operation, and of an identity.
    """
    return tensor.view_as(tensor) if torch.compiler.is_compiling() else tensor
