# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Hyper-Connections (arXiv 2409.19606), in the place of residual connections.

For one token, in the letters of `connection.py`, the rows of H are its N streams. A sub-layer reads, mixes and writes
them with

    A = [A_m | A_r]  N x (N+1)      b  N

    width connection    branch_input = A_m^T H          what the branch reads
                        H'           = A_r^T H          the streams, mixed
    depth connection    H_next       = b (outer) branch_output + H'

`A_r[i, j]` is the weight of stream i in the new stream j. Static hyper-connections (SHC) learn A and b; dynamic ones
(DHC) add to each a small term predicted from the token's own streams (Eqs. 10-13):

    A = static_alpha + dynamic_alpha_scale * tanh(norm(H) @ dynamic_alpha_fn)
    b = static_beta  + dynamic_beta_scale  * tanh(norm(H) @ dynamic_beta_fn)

At the equivalent initialization (Eq. 14), A = [e_{k mod N} | I] and b = 1. All streams stay equal, and the model
equals its Pre-Norm base bit for bit. For that, coefficients are computed and streams are mixed in float32, without
reduced-precision matrix products. Each stream is rounded once, when it is written.
"""

from typing import Any

import torch
from torch import nn

from .computing import is_transformed, products_on
from .connection import Connection, Streams, Writer, compute_dtype, without_autocast
from .connection_weights import in_float32
from .hc_step import read_by_step
from .hc_torch import ConnectionParameters
from .norm_forms import NormForm, form_of


def read_and_mix_by_matrix(
    streams: torch.Tensor, alpha: torch.Tensor, reads: int = 1
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the streams read and mixed by A; its columns are A_m, then A_r. Eqs. 3 and 4.

    streams: H, `[B, S, N, D]`.
    alpha: A, `[N, reads + N]` or `[B, S, N, reads + N]`, float32 (float64 for float64 streams).
    reads: number of columns of A_m.

    Returns A_m^T H, `[B, S, reads, D]` in the dtype of the streams, and H' `[B, S, N, D]` in the dtype of `alpha`.
    """
    products = products_on(streams.device).mixed(alpha, streams.to(alpha.dtype))
    return products[..., :reads, :].to(streams.dtype), products[..., reads:, :]


class HyperConnection(Connection):
    """The hyper-connection around one sub-layer, static or dynamic.

    hidden_size, hc_mult, sub_layer: see `Connection`.
    norm: for DHC, a norm of the last dimension of `[B, S, N, D]` that serves the prediction alone; None for SHC.
    tanh: whether the predicted term goes through tanh.
    written: for the history start, the streams that the branch writes at first; it reads stream 0. None for the
        paper's start, where the branch reads stream k mod N and writes all.
    """

    decayed: tuple[str, ...] = ("dynamic_alpha_fn", "dynamic_beta_fn")
    static_alpha: nn.Parameter
    static_beta: nn.Parameter
    dynamic_alpha_fn: nn.Parameter
    dynamic_beta_fn: nn.Parameter
    dynamic_alpha_scale: nn.Parameter
    dynamic_beta_scale: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        hc_mult: int,
        sub_layer: int,
        norm: nn.Module | None = None,
        tanh: bool = True,
        written: tuple[int, ...] | None = None,
    ):
        super().__init__(hidden_size, hc_mult, sub_layer)
        self.tanh, self.written = tanh, written
        self.norm_form: NormForm | None
        self.norm = norm if norm is None else in_float32(norm)
        self.register_initial_values()

    def __setattr__(self, name: str, value) -> None:
        super().__setattr__(name, value)
        if name == "norm":
            self.norm_form = None if value is None else form_of(value, self.stream_size)

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return the equivalent initialization of every parameter but the norm's, float32 (Eq. 14, Algorithm 2)."""
        alpha = self.initial_alpha()
        rows, columns = alpha.shape
        beta = [float(self.written is None or i in self.written) for i in range(rows)]
        values = {"static_alpha": alpha, "static_beta": torch.tensor(beta, dtype=torch.float32)}
        if self.norm is not None:
            values["dynamic_alpha_fn"] = torch.zeros(self.stream_size, columns, dtype=torch.float32)
            values["dynamic_beta_fn"] = torch.zeros(self.stream_size, dtype=torch.float32)
            values["dynamic_alpha_scale"] = torch.full((1,), 0.01, dtype=torch.float32)
            values["dynamic_beta_scale"] = torch.full((1,), 0.01, dtype=torch.float32)
        return values

    @property
    def stream_size(self) -> int:
        """Return the width of one stream."""
        return self.hidden_size

    def initial_alpha(self) -> torch.Tensor:
        """Return A at the start, which reads one stream and mixes none."""
        identity = torch.eye(self.hc_mult, dtype=torch.float32)
        read = self.sub_layer % self.hc_mult if self.written is None else 0
        return torch.cat([identity[:, read : read + 1], identity], dim=1)

    def coefficients(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A `[N, N+1]` and b `[N]` of streams `[B, S, N, D]`, float32; for DHC with `[B, S]` before them."""
        dtype = compute_dtype(streams.dtype)
        alpha = self.static_alpha.to(dtype)
        beta = self.static_beta.to(dtype, copy=True)  # it outlives this forward, after which FSDP frees parameters
        if self.norm is None:
            return alpha, beta
        normed = self.norm(streams.to(dtype)).to(dtype)
        predicted_alpha = normed @ self.dynamic_alpha_fn.to(dtype)
        predicted_beta = normed @ self.dynamic_beta_fn.to(dtype)
        if self.tanh:
            predicted_alpha, predicted_beta = predicted_alpha.tanh(), predicted_beta.tanh()
        return (
            alpha + self.dynamic_alpha_scale.to(dtype) * predicted_alpha,
            beta + self.dynamic_beta_scale.to(dtype) * predicted_beta,
        )

    def read_and_mix(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        alpha, beta = self.coefficients(streams)
        read, mixed = read_and_mix_by_matrix(streams, alpha)
        return read.squeeze(-2), mixed, beta

    def matrices(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return A `[B, S, N, reads + N]` and b `[B, S, N]` of each token of streams `[B, S, N, D]`, float32."""
        alpha, beta = self.coefficients(streams)
        tokens = streams.shape[:-2]
        return alpha.expand(*tokens, *alpha.shape[-2:]), beta.expand(*tokens, *beta.shape[-1:])

    def coefficient_parameters(self, dtype: torch.dtype) -> ConnectionParameters | None:
        """Return a step's parameters for `coefficients`, in `dtype`; None if the norm must be called.

        An unknown norm must be called. So must a norm whose weight is elsewhere until its hooks load it.
        """
        static = self.static_alpha, self.static_beta
        if self.norm is None:
            return ConnectionParameters(*static).to(dtype)
        form = self.norm_form
        if form is None or (norm_parameters := form.parameters_of(self.norm)) is None:
            return None
        weight, bias = norm_parameters
        if weight is not None and weight.device != static[0].device:
            return None
        fn = self.dynamic_alpha_fn, self.dynamic_beta_fn
        scales = self.dynamic_alpha_scale, self.dynamic_beta_scale
        return ConnectionParameters(*static, *fn, weight, bias, *scales, form.eps, form.centred, self.tanh).to(dtype)

    def forward(self, streams: Streams) -> tuple[torch.Tensor, Writer]:
        if not is_transformed():
            with without_autocast(streams.values):
                parameters = self.coefficient_parameters(compute_dtype(streams.values.dtype))
                if parameters is not None:
                    return read_by_step(streams, parameters)
        return super().forward(streams)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tanh={self.tanh}"


def static(layer: Any, sub_layer: int, sub_layers: int) -> HyperConnection:
    """Make the static connection around sub-layer k of a layer, by its config."""
    config, written = layer.config, layer.written_streams(sub_layer, sub_layers)
    return HyperConnection(config.hidden_size, config.hc_mult, sub_layer, written=written)


def dynamic(layer: Any, sub_layer: int, sub_layers: int) -> HyperConnection:
    """Make the dynamic connection around sub-layer k of a layer, by its config."""
    config, written = layer.config, layer.written_streams(sub_layer, sub_layers)
    norm, tanh = layer.make_norm(), config.hc_tanh
    return HyperConnection(config.hidden_size, config.hc_mult, sub_layer, norm=norm, tanh=tanh, written=written)
