# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Skips from the embedding: each decoder layer also reads the embedding.

For one token, r is the residual stream and e the embedding divided by its root mean square. Before the first sub-layer
of a layer, with the learned numbers a and b

    r <- a r + b e

At the start a is 1 and b is 0, so that the model equals its Pre-Norm base bit for bit. modded-nanogpt and nanochat do
the same, and also norm the embedding in the residual stream.

The streams are `[B, S, 2, D]`: r and e. Within a decoder layer they stay apart.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .connection import (
    Connection,
    apply_recorded,
    as_new_output,
    broadcast_output,
    compute_dtype,
    without_autocast,
)


@dataclass(eq=False)
class Skipping:
    """Streams on their way from sub-layer to sub-layer, and the carry of one.

    residual, embedding: r and e, `[B, S, D]`.
    """

    residual: torch.Tensor
    embedding: torch.Tensor

    def __len__(self) -> int:
        """Return B, as a tensor does, for PEFT."""
        return len(self.residual)

    def written(self) -> torch.Tensor:
        """Return the streams `[B, S, 2, D]`."""
        return torch.stack([self.residual, self.embedding], dim=-2)

    def write(self, branch_output: torch.Tensor) -> "Skipping":
        """Add a branch output `[B, S, D]` to r."""
        return Skipping(self.residual + broadcast_output(branch_output, self.residual.shape), self.embedding)


class EmbeddingSkip(Connection):
    """The residual addition around one sub-layer, before the first of a layer with the skip from the embedding.

    hidden_size, sub_layer: see `Connection`.
    is_first: whether the sub-layer is the first of its layer.
    eps: of the norm of the embedding.
    """

    factors: nn.Parameter

    def __init__(self, hidden_size: int, sub_layer: int, is_first: bool = True, eps: float = 1e-6):
        super().__init__(hidden_size, 2, sub_layer)
        self.is_first, self.eps = is_first, eps
        self.register_initial_values()

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return a and b, `[2]`, float32, of the first sub-layer of a layer."""
        return {"factors": torch.tensor([1.0, 0.0], dtype=torch.float32)} if self.is_first else {}

    def expand_streams(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return r and e, `[B, S, 2, D]`, of hidden states `[B, S, D]`."""
        with without_autocast(hidden_states):
            values = hidden_states.to(compute_dtype(hidden_states.dtype))
            embedding = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + self.eps)
            return torch.stack([hidden_states, embedding.to(hidden_states.dtype)], dim=-2)

    def reduce_streams(self, streams: torch.Tensor, readout: str) -> torch.Tensor:
        """Return r, `[B, S, D]`, of streams `[B, S, 2, D]`."""
        return streams[..., 0, :].contiguous()

    def take(self, streams: torch.Tensor) -> Skipping:
        """Return streams `[B, S, 2, D]` as the input of `forward`."""
        return Skipping(*streams.unbind(-2))

    def forward(self, streams: Skipping) -> tuple[torch.Tensor, Skipping]:
        """Return the residual stream with the skip, and the carry: the width connection."""
        residual, embedding = streams.residual, streams.embedding
        if not self.is_first:
            return residual, streams
        with without_autocast(residual):
            read = apply_recorded(_Read, self.factors.to(compute_dtype(residual.dtype)), residual, embedding)
        return read, Skipping(read, embedding)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, is_first={self.is_first}, eps={self.eps}"


class _Read(torch.autograd.Function):
    """a r + b e, `[B, S, D]`, in the dtype of r. The backward keeps r and e in their own dtype."""

    generate_vmap_rule = True

    @staticmethod
    def forward(factors: torch.Tensor, residual: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        a, b = factors.unbind()
        read = a * residual.to(factors.dtype) + b * embedding.to(factors.dtype)
        return as_new_output(read.to(residual.dtype))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, grad_output):
        factors, residual, embedding = ctx.saved_tensors
        a, b = factors.unbind()
        grad = grad_output.to(factors.dtype)
        of_factors = torch.stack([(grad * values.to(grad.dtype)).sum() for values in (residual, embedding)])
        return of_factors, (a * grad).to(residual.dtype), (b * grad).to(embedding.dtype)


def skip(layer: Any, sub_layer: int, sub_layers: int) -> EmbeddingSkip:
    """Make the connection around sub-layer k of a layer, by its config."""
    is_first = sub_layer % len(layer.parts) == 0
    return EmbeddingSkip(layer.config.hidden_size, sub_layer, is_first, layer.config.hc_eps)
