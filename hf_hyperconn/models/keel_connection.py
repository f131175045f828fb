# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Keel (arXiv 2601.19895): a post-norm residual connection whose residual outweighs its branch.

Sub-layer k of K, counted from zero, with the branch F, which norms its input, computes

    x_next = Norm(alpha x + F(x))      alpha = K

Sub-layers 0 and 1 have alpha = 1, and sub-layer 0 has no Norm (Section 3.1).
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .connection import Carry, Connection, compute_dtype
from .connection_weights import in_float32


@dataclass(eq=False)
class KeelCarry(Carry):
    """A carry whose stream is normed after writing, in float32.

    norm: norm of the connection.
    """

    norm: nn.Module

    def added(self, branch_output: torch.Tensor) -> torch.Tensor:
        return self.norm(super().added(branch_output))


class KeelConnection(Connection):
    """Keel's connection around one sub-layer; the only stream is `[B, S, 1, D]`.

    hidden_size, sub_layer: see `Connection`.
    sub_layers: K, of the whole model.
    norm: norm of the family's kind, after the addition.
    """

    def __init__(self, hidden_size: int, sub_layer: int, sub_layers: int, norm: nn.Module):
        super().__init__(hidden_size, 1, sub_layer)
        self.alpha = float(sub_layers) if sub_layer > 1 else 1.0
        self.norm = in_float32(norm) if sub_layer > 0 else nn.Identity()

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return nothing: the only parameters are the norm's."""
        return {}

    def read_and_mix(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values = streams.to(compute_dtype(streams.dtype))
        return streams.squeeze(-2), self.alpha * values, values.new_ones(1)

    def carry(self, mixed: torch.Tensor, beta: torch.Tensor, dtype: torch.dtype) -> KeelCarry:
        return KeelCarry(mixed, beta, dtype, self.norm)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha={self.alpha}"


def keel(layer: Any, sub_layer: int, sub_layers: int) -> KeelConnection:
    """Make the connection around sub-layer k of a layer, by its config."""
    return KeelConnection(layer.config.hidden_size, sub_layer, sub_layers, norm=layer.make_norm())
