# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""ResiDual (arXiv 2304.14802): a Post-Norm and a Pre-Norm residual stream side by side.

Sub-layer k has the branch F, which norms its input. x is the Post-Norm stream and d the Pre-Norm stream. Both begin as
the embedding.

    x_next = Norm(x + F(x))      d_next = d + F(x)

After the last, the two become x + Norm(d). The family's final norm follows.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .connection import Carry, Connection, compute_dtype
from .connection_weights import WideModule, in_float32


@dataclass(eq=False)
class DualCarry(Carry):
    """A carry whose x is normed after writing, in float32.

    norm: norm of the connection.
    """

    norm: nn.Module

    def added(self, branch_output: torch.Tensor) -> torch.Tensor:
        x, d = super().added(branch_output).unbind(-2)
        return torch.stack([self.norm(x), d], dim=-2)


class DualResidual(Connection):
    """ResiDual's connection around one sub-layer; streams are `[B, S, 2, D]`, x and d.

    hidden_size, sub_layer: see `Connection`.
    norm: norm of the family's kind, after the addition to x.
    """

    def __init__(self, hidden_size: int, sub_layer: int, norm: nn.Module):
        super().__init__(hidden_size, 2, sub_layer)
        self.norm = in_float32(norm)

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return nothing: the only parameters are the norm's."""
        return {}

    def read_and_mix(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values = streams.to(compute_dtype(streams.dtype))
        return streams[..., 0, :], values, values.new_ones(2)

    def carry(self, mixed: torch.Tensor, beta: torch.Tensor, dtype: torch.dtype) -> DualCarry:
        return DualCarry(mixed, beta, dtype, self.norm)


class DualReadout(WideModule):
    """x + Norm(d) of the last streams.

    norm: norm of the family's kind.
    """

    def __init__(self, norm: nn.Module):
        super().__init__()
        self.norm = in_float32(norm)

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return nothing: the only parameters are the norm's."""
        return {}

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the hidden states `[B, S, D]` of streams `[B, S, 2, D]`, in their dtype."""
        x, d = streams.to(compute_dtype(streams.dtype)).unbind(-2)
        return (x + self.norm(d)).to(streams.dtype)


def dual(layer: Any, sub_layer: int, sub_layers: int) -> DualResidual:
    """Make the connection around sub-layer k of a layer, by its config."""
    return DualResidual(layer.config.hidden_size, sub_layer, norm=layer.make_norm())


def dual_readout(layer: Any) -> DualReadout:
    """Make the readout of a last layer."""
    return DualReadout(layer.make_norm())
