# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Readouts with parameters, and reads of streams by predicted weights, for mHC and iHC, too.

Such reads split streams into their mean and deviations from it, which vanish when all streams are equal.
"""

import math
from typing import Any

import torch
from torch import nn

from .computing import products_on
from .connection import compute_dtype, stream_mean, without_autocast
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
    """Make the readout of a last layer, by its config."""
    config, n = layer.config, layer.config.hc_mult
    return WeightedReadout((1.0, *[0.0] * (n - 1)) if config.hc_start == "history" else (1 / n,) * n)


class LearnedReadout(WideModule):
    """DeepSeek-V4's head: the last streams, summed with weights that each token predicts.

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
    """Make the readout of a last layer, by its config."""
    config = layer.config
    return LearnedReadout(config.hidden_size, config.hc_mult, config.hc_eps)


def normed_projection(streams: torch.Tensor, fn: torch.Tensor, eps: float) -> torch.Tensor:
    """Return the RMSNorm, without weight, of a token's streams as one vector, times `fn` `[M, N D]`: `[B, S, M]`."""
    flat = streams.flatten(-2)
    return (flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)) @ fn.transpose(0, 1)


def centred(streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the mean `[B, S, D]` of streams `[B, S, N, D]`, exact if they are equal, and their deviations from it."""
    mean = stream_mean(streams)
    return mean, streams - mean.unsqueeze(-2)


def read_streams(weights: torch.Tensor, mean: torch.Tensor, deviations: torch.Tensor) -> torch.Tensor:
    """Return the sum, with weights `[B, S, N]`, of the streams with a mean and deviations: `[B, S, D]`."""
    mixed = products_on(mean.device).mixed(weights.unsqueeze(-1), deviations)
    return weights.sum(-1, keepdim=True) * mean + mixed.squeeze(-2)


def logit(probability: float) -> float:
    """Return the number whose sigmoid is a probability."""
    return math.log(probability / (1 - probability))
