# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""A learned weight for each of the last streams."""

from typing import Any

import torch
from torch import nn

from .connection import compute_dtype, without_autocast
from .connection_weights import WideModule


class WeightedReadout(WideModule):
    """The last streams, summed with learned weights.

    weights: one for each stream, at the start.
    """

    static_gamma: nn.Parameter

    def __init__(self, weights: tuple[float, ...]):
        super().__init__()
        self.weights = weights
        self.register_initial_values()

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return the weights at the start, float32."""
        return {"static_gamma": torch.tensor(self.weights, dtype=torch.float32)}

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the hidden states `[B, S, D]` of streams `[B, S, N, D]`, in their dtype.

        Equal streams whose weights sum to 1 are read exactly. So is a stream of weight 1 beside streams of weight 0.
        """
        with without_autocast(streams):
            values = streams.to(compute_dtype(streams.dtype))
            weights, first = self.static_gamma.to(values.dtype), values[..., 0, :]
            others: Any = sum(weights[i] * (values[..., i, :] - first) for i in range(1, len(weights)))
            return (weights.sum() * first + others).to(streams.dtype)

    def extra_repr(self) -> str:
        return f"hc_mult={len(self.weights)}"


def weighted(layer: Any) -> WeightedReadout:
    """Make the readout of a last layer, as its config asks for."""
    config, n = layer.config, layer.config.hc_mult
    return WeightedReadout((1.0, *[0.0] * (n - 1)) if config.hc_start == "history" else (1 / n,) * n)
