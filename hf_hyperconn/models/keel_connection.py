# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Keel (arXiv 2601.19895): a post-norm residual connection whose residual outweighs its branch.

For sub-layer k of K, counted from zero, with its branch F (which norms its input)

    x_next = Norm(alpha x + F(x))      alpha = K

Sub-layers 0 and 1 have alpha = 1, and sub-layer 0 has no Norm (Section 3.1).
"""

import torch
from torch import nn

from .hyper_connections import Carry, Connection, compute_dtype, in_float32


class KeelConnection(Connection):
    """Keel's connection around one sub-layer; the only stream is `[B, S, 1, D]`.

    hidden_size, sub_layer: see `Connection`.
    sub_layers: K, of the whole model.
    norm: of the family's kind, after the addition.
    """

    def __init__(self, hidden_size: int, sub_layer: int, sub_layers: int, norm: nn.Module):
        super().__init__(hidden_size, 1, sub_layer)
        self.alpha = float(sub_layers) if sub_layer > 1 else 1.0
        self.norm = in_float32(norm) if sub_layer > 0 else nn.Identity()

    def initial_values(self) -> dict[str, torch.Tensor]:
        """None: Keel has no parameters but its norm's."""
        return {}

    def connect(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        values = streams.to(compute_dtype(streams.dtype))
        return streams.squeeze(-2), self.alpha * values, values.new_ones(1)

    def depth_connection(self, carry: Carry, branch_output: torch.Tensor) -> torch.Tensor:
        """The next stream `[B, S, 1, D]`, normed in float32."""
        mixed, beta, dtype = carry
        normed = self.norm(super().depth_connection(Carry(mixed, beta, mixed.dtype), branch_output))
        return normed.to(torch.promote_types(dtype, branch_output.dtype))

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, alpha={self.alpha}"
