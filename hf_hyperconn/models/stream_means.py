# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Streams as their mean and deviations from it, which vanish when all streams are equal; predictions from streams."""

import math

import torch

from .computing import products_on
from .connection import stream_mean


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
