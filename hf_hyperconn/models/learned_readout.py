# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""DeepSeek-V4's head: the last streams, summed with weights that each token predicts."""

from typing import Any

import torch
from torch import nn

from .connection import compute_dtype, without_autocast
from .connection_weights import WideModule
from .stream_means import centred, logit, normed_projection, read_streams


class LearnedReadout(WideModule):
    """A readout whose weights each token predicts.

    hidden_size, hc_mult: D and N. At the start every weight is 1/N.
    eps: added to the weights, and in the norm.
    """

    decayed = ("hc_fn",)
    hc_fn: nn.Parameter
    hc_base: nn.Parameter
    hc_scale: nn.Parameter

    def __init__(self, hidden_size: int, hc_mult: int, eps: float = 1e-6):
        super().__init__()
        self.hidden_size, self.hc_mult, self.eps = hidden_size, hc_mult, eps
        self.register_initial_values()

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return every parameter at the start, float32."""
        n = self.hc_mult
        return {
            "hc_fn": torch.zeros(n, n * self.hidden_size, dtype=torch.float32),
            "hc_base": torch.full((n,), logit(1 / n - self.eps), dtype=torch.float32),
            "hc_scale": torch.full((1,), 0.01, dtype=torch.float32),
        }

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the hidden states `[B, S, D]` of streams `[B, S, N, D]`, in their dtype."""
        with without_autocast(streams):
            dtype = compute_dtype(streams.dtype)
            logits = normed_projection(streams.to(dtype), self.hc_fn.to(dtype), self.eps)
            weights = torch.sigmoid(self.hc_scale.to(dtype) * logits + self.hc_base.to(dtype)) + self.eps
            mean, deviations = centred(streams.to(dtype))
            return read_streams(weights, mean, deviations).to(streams.dtype)


def learned(layer: Any) -> LearnedReadout:
    """Make the readout of a last layer, as its config asks for."""
    config = layer.config
    return LearnedReadout(config.hidden_size, config.hc_mult, config.hc_eps)
