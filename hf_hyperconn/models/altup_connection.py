# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""AltUp (arXiv 2301.13310): of K copies of the hidden state one is computed, and corrects the others.

For one token, x_1 .. x_K are its streams. Sub-layer k with the branch F reads stream j (Algorithm 1, around a
sub-layer and its residual addition instead of a layer):

    predict    y_i    = sum_m p_{i,m} x_m
    compute    z      = x_j + F(x_j)
    correct    x_i'   = y_i + g_i (z - y_j)

This is a static hyper-connection with fewer parameters, in the letters of `hyper_connections.py`

    A_m = e_j      A_r[m, i] = p_{i,m} + g_i (e_j[m] - p_{j,m})      b = g

and is computed as one. At the start p is the identity and g is 1.
"""

from typing import Any

import torch
from torch import nn

from .connection import compute_dtype
from .hc_torch import ConnectionParameters
from .hyper_connections import HyperConnection


class AltUpConnection(HyperConnection):
    """AltUp around one sub-layer.

    hidden_size, hc_mult, sub_layer: see `Connection`.
    selection: "alternating", so that j is k mod K; or "same", always the first.
    """

    decayed = ()
    prediction: nn.Parameter
    correction: nn.Parameter

    def __init__(self, hidden_size: int, hc_mult: int, sub_layer: int, selection: str = "alternating"):
        self.selected = sub_layer % hc_mult if selection == "alternating" else 0
        super().__init__(hidden_size, hc_mult, sub_layer)

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return p `[K, K]` and g `[K]`, float32."""
        return {
            "prediction": torch.eye(self.hc_mult, dtype=torch.float32),
            "correction": torch.ones(self.hc_mult, dtype=torch.float32),
        }

    def coefficients(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A `[K, K+1]` and b `[K]` in the compute dtype of streams `[B, S, K, D]`."""
        return self._coefficients(compute_dtype(streams.dtype))

    def coefficient_parameters(self, dtype: torch.dtype) -> ConnectionParameters:
        return ConnectionParameters(*self._coefficients(dtype))

    def _coefficients(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        prediction, correction = self.prediction.to(dtype), self.correction.to(dtype, copy=True)
        read = torch.eye(self.hc_mult, dtype=dtype, device=prediction.device)[self.selected]
        mix = prediction.transpose(0, 1) + torch.outer(read - prediction[self.selected], correction)
        return torch.cat([read.unsqueeze(-1), mix], dim=-1), correction

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, selected={self.selected}"


def altup(layer: Any, sub_layer: int, sub_layers: int) -> AltUpConnection:
    """Make the connection around sub-layer k of a layer, by its config."""
    config = layer.config
    return AltUpConnection(config.hidden_size, config.hc_mult, sub_layer, config.hc_selection)
