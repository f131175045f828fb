# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""What stands around a sub-layer: a width connection before its branch, and a depth connection after it.

This is what every kind of connection has in common. Letters: B batch, S sequence, N residual streams, D hidden size; k
counts sub-layers from zero (attention of decoder layer i is k = 2i, its MLP is k = 2i + 1). A *branch* is norm +
attention, or norm + MLP. Equations are those of Hyper-Connections (arXiv 2409.19606).
"""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from .connection_weights import WideModule

OVERFLOW = 2.0**100  # beyond what float16 holds


class Written(Protocol):
    """Streams on their way to a connection: what its `take` gives, or what a carry has written."""

    def written(self) -> torch.Tensor:
        """The streams, `[B, S, N, D]`."""


class Writer(Protocol):
    """What any width connection leaves for its branch's output."""

    def write(self, branch_output: torch.Tensor) -> Written:
        """The next streams, of a branch output `[B, S, D]`."""


@dataclass(eq=False)
class Streams:
    """Residual streams on their way to a connection.

    values: H, `[B, S, N, D]`.
    """

    values: torch.Tensor

    def __len__(self) -> int:
        """B, as of a tensor: PEFT asks for it."""
        return len(self.values)

    def written(self) -> torch.Tensor:
        """H, `[B, S, N, D]`."""
        return self.values


@dataclass(eq=False)
class Carry:
    """What a width connection leaves for its branch's output: streams that are mixed, to be written to.

    mixed: H', the mixed streams, `[B, S, N, D]`, float32 (float64 for float64 streams).
    beta: b, the write weights, `[N]` or `[B, S, N]`, same dtype.
    dtype: the dtype of the streams.
    """

    mixed: torch.Tensor
    beta: torch.Tensor
    dtype: torch.dtype

    def write(self, branch_output: torch.Tensor) -> Streams:
        """The depth connection: the next streams, of a branch output `[B, S, D]`.

        They have the dtype that `streams + branch_output` would have.
        """
        dtype = torch.promote_types(self.dtype, branch_output.dtype)
        return Streams(self.added(without_overflow(branch_output.to(self.mixed.dtype), dtype)).to(dtype))

    def added(self, branch_output: torch.Tensor) -> torch.Tensor:
        """The next streams before they are rounded, `[B, S, N, D]`, of an output in their dtype. Eq. 5."""
        *tokens, _, size = self.mixed.shape
        return self.mixed + self.beta.unsqueeze(-1) * of_every_token(branch_output, (*tokens, size)).unsqueeze(-2)


def expand_streams(hidden_states: torch.Tensor, hc_mult: int) -> torch.Tensor:
    """Repeat hidden states `[B, S, D]` into `hc_mult` equal streams, `[B, S, N, D]` (a view). Section 2.1."""
    return hidden_states.unsqueeze(-2).expand(*hidden_states.shape[:-1], hc_mult, hidden_states.shape[-1])


def reduce_streams(streams: torch.Tensor, readout: str = "mean") -> torch.Tensor:
    """Read hidden states `[B, S, D]` out of streams `[B, S, N, D]`, in the dtype of the streams.

    readout: "mean", which returns equal streams themselves, exactly, for every N; or "sum", the paper's, which hands
    N times the vector to the final norm.
    """
    values = streams.to(compute_dtype(streams.dtype))
    return (values.sum(-2) if readout == "sum" else stream_mean(values)).to(streams.dtype)


def stream_mean(streams: torch.Tensor) -> torch.Tensor:
    """The mean `[B, S, D]` of streams `[B, S, N, D]`; of equal streams themselves, exactly."""
    first = streams[..., 0, :]
    return first + (streams - first.unsqueeze(-2)).mean(-2)


class Connection(WideModule):
    """What stands around one sub-layer: a width connection before its branch and a depth connection after it.

    hidden_size: D.
    hc_mult: N, at least 1.
    sub_layer: k.

    Parameters are float32 whatever the default dtype, and stay it; the forward casts up whatever they have become.
    """

    def __init__(self, hidden_size: int, hc_mult: int, sub_layer: int):
        super().__init__()
        self.hidden_size, self.hc_mult, self.sub_layer = hidden_size, hc_mult, sub_layer

    def expand_streams(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The first streams, `[B, S, N, D]`, of hidden states `[B, S, D]`."""
        return expand_streams(hidden_states, self.hc_mult)

    def reduce_streams(self, streams: torch.Tensor, readout: str) -> torch.Tensor:
        """Hidden states `[B, S, D]` of streams."""
        return reduce_streams(streams, readout)

    def connect(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From streams `[B, S, N, D]`, the branch input `[B, S, D]` in their dtype, and H' and b of `Carry`."""
        raise NotImplementedError

    def take(self, streams: torch.Tensor) -> Written:
        """Streams `[B, S, N, D]` as `forward` takes them."""
        return Streams(streams)

    def forward(self, streams: Any) -> tuple[torch.Tensor, Writer]:
        """The width connection; a forward, so that hooks and wrappers of the module see it.

        streams: what `take` gives, or what the carry of the sub-layer before has written.

        Returns the branch input `[B, S, D]` and the carry, whose `write` takes the branch's output.
        """
        values = streams.written()
        with without_autocast(values):
            branch_input, mixed, beta = self.connect(values)
        return branch_input, self.carry(mixed, beta, values.dtype)

    def carry(self, mixed: torch.Tensor, beta: torch.Tensor, dtype: torch.dtype) -> Carry:
        """What writes a branch's output to H', with b, as streams of a dtype."""
        return Carry(mixed, beta, dtype)

    def width_connection(self, streams: torch.Tensor) -> tuple[torch.Tensor, Writer]:
        """`forward`, of streams `[B, S, N, D]` as a tensor."""
        return self(self.take(streams))

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, hc_mult={self.hc_mult}, sub_layer={self.sub_layer}"


def of_every_token(branch_output: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A branch output of the shape that an addition would broadcast it to, `[B, S, D]`."""
    if not torch.jit.is_tracing() and branch_output.shape == shape:
        return branch_output
    return branch_output.expand(shape)


def without_overflow(branch_output: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A branch output in the compute dtype, whose products with 0 are 0, to be written to streams of a dtype.

    Families that train in float16 clamp streams that overflow; a branch that did so leaves others as they are.
    """
    return branch_output.clamp(-OVERFLOW, OVERFLOW) if dtype == torch.float16 else branch_output


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which streams of `dtype` are computed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def without_autocast(tensor: torch.Tensor) -> AbstractContextManager:
    """A context in which operations on `tensor` keep the dtypes that they are given."""
    device = tensor.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):  # which raises where there is no autocast
        return nullcontext()
    return torch.autocast(device, enabled=False)


def returned(tensor: torch.Tensor) -> torch.Tensor:
    """What the forward of a function of our own returns: the tensor; to a compiler a view of it.

    Before torch 2.12 Dynamo loses the gradient of what an operation in place, or one that does nothing, returns.
    """
    return tensor.view_as(tensor) if torch.compiler.is_compiling() else tensor
