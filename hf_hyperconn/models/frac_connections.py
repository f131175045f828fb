# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Frac-connections (arXiv 2503.14125): m parts of the hidden state where hyper-connections carry n copies of it.

For one token, the rows of H are its m parts of D/m values. A sub-layer T reads, mixes and writes them with

    A = [Y | A_r]  m x 2m      b  m
    H_next = diag(b) T(Y^T H) + A_r^T H

where T accepts and returns all parts side by side. As for hyper-connections, A and b may have a term predicted from
each row of norm(H). At Y = A_r = I and b = 1 this is exactly the residual connection.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .connection import Carry
from .hyper_connections import HyperConnection, read_and_mix_by_matrix


@dataclass(eq=False)
class FracCarry(Carry):
    """A carry to which a branch output `[B, S, D]` is written part by part, `[B, S, m, D / m]`."""

    def added(self, branch_output: torch.Tensor) -> torch.Tensor:
        parts = branch_output.unflatten(-1, self.mixed.shape[-2:])
        return self.mixed + self.beta.unsqueeze(-1) * parts


class FracConnection(HyperConnection):
    """The frac-connection around one sub-layer.

    hidden_size, sub_layer: see `Connection`.
    hc_mult: m, which divides the hidden size; streams are `[B, S, m, D / m]`.
    norm: of width D / m, to predict the coefficients; None for static coefficients.
    tanh: whether the predicted term goes through tanh.
    """

    @property
    def stream_size(self) -> int:
        """Return the width of one part."""
        return self.hidden_size // self.hc_mult

    def initial_alpha(self) -> torch.Tensor:
        """Return A with Y = A_r = I."""
        return torch.cat([torch.eye(self.hc_mult, dtype=torch.float32)] * 2, dim=1)

    def expand_streams(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the parts `[B, S, m, D / m]` of hidden states `[B, S, D]`."""
        return hidden_states.unflatten(-1, (self.hc_mult, -1))

    def reduce_streams(self, streams: torch.Tensor, readout: str) -> torch.Tensor:
        """Return the hidden states `[B, S, D]` of the parts, whatever the readout."""
        return streams.flatten(-2)

    def coefficient_parameters(self, dtype: torch.dtype) -> None:
        """Return None: steps read streams into one, and not parts."""
        return None

    def read_and_mix(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        alpha, beta = self.coefficients(streams)
        read, mixed = read_and_mix_by_matrix(streams, alpha, reads=self.hc_mult)
        return read.flatten(-2), mixed, beta

    def carry(self, mixed: torch.Tensor, beta: torch.Tensor, dtype: torch.dtype) -> FracCarry:
        return FracCarry(mixed, beta, dtype)


def narrow_norm(norm: nn.Module, size: int) -> nn.Module:
    """Return a norm of one part, cut from a new norm of the hidden size: its first `size` channels.

    Raises `ValueError` for a norm made of other modules, whose channels can't be separated.
    """
    parameters = dict(norm.named_parameters())
    if any("." in name for name in parameters):
        raise ValueError(
            f"frac-connections predict their coefficients with a norm of one part, and {type(norm).__name__} can't be "
            f"cut to one. Use another connection."
        )
    for name, parameter in parameters.items():
        setattr(norm, name, nn.Parameter(parameter.detach()[:size].clone()))
    for name, value in {"normalized_shape": (size,), "size": size}.items():
        if hasattr(norm, name):
            setattr(norm, name, value)
    return norm


def frac(layer: Any, sub_layer: int, sub_layers: int) -> FracConnection:
    """Make the connection around sub-layer k of a layer, by its config.

    Raises `ValueError` as `narrow_norm`.
    """
    config = layer.config
    norm = narrow_norm(layer.make_norm(), config.hidden_size // config.hc_mult)
    return FracConnection(config.hidden_size, config.hc_mult, sub_layer, norm=norm, tanh=config.hc_tanh)
