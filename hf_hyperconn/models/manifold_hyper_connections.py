# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Manifold-constrained hyper-connections: mHC (arXiv 2512.24880), and iHC, which leaves the streams unmixed.

For one token, x holds its N streams. With x' = RMSNorm(vec(x)), without weight, the sub-layer F computes (Eqs. 3, 7-9)

    read    H_pre  = sigmoid(alpha_pre  x' phi_pre  + b_pre)
    write   H_post = 2 sigmoid(alpha_post x' phi_post + b_post)
    mix     H_res  = Sinkhorn(alpha_res  x' phi_res  + b_res)      rows and columns sum to 1; for iHC the identity
    x_next  = H_res x + H_post (outer) F(H_pre x)

Parameters have the names and layout of DeepseekV4HyperConnection in Transformers. The rows of `fn` and `base` and the
three `scale`s are read, write and mix, in this order. The mix is stored by columns of H_res; DeepSeek-V4 calls the
transpose of H_res `comb`.

Streams are read and mixed as their mean plus weighted deviations from it. The deviations vanish when all streams are
equal, so a converted model keeps its base's streams, whatever the rounding of the weights.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from .computing import chosen_implementation, gradients, is_transformed, needs_autograd, products_on
from .connection import Connection, Streams, Writer, broadcast_output, compute_dtype, without_autocast
from .connection_fields import FAVOURED_READ, KEPT_SHARE
from .readouts import centred, logit, normed_projection, read_streams
from .sinkhorn import sinkhorn

BIAS = 3.0


@dataclass(eq=False)
class ManifoldCarry:
    """The carry of a width connection by the fused kernels.

    streams: x, `[B, S, N, D]`; its gradient is the gradient of H_res x.
    beta: H_post, `[B, S, N]`, float32.
    mix: H_res, `[B, S, N, N]`, float32, without a gradient: it goes through the streams. Empty for iHC.
    mixes: whether there is a mix.
    """

    streams: torch.Tensor
    beta: torch.Tensor
    mix: torch.Tensor
    mixes: bool

    def write(self, branch_output: torch.Tensor) -> Streams:
        """Return the next streams, of a branch output `[B, S, D]`: the depth connection."""
        *tokens, _, size = self.streams.shape
        branch_output = broadcast_output(branch_output, (*tokens, size))
        with without_autocast(branch_output):
            return Streams(_Depth.apply(self.mixes, self.streams, self.beta, self.mix, branch_output))


class ManifoldHyperConnection(Connection):
    """The manifold-constrained hyper-connection around one sub-layer.

    hidden_size, hc_mult, sub_layer: as for `HyperConnection`; at least two streams. At the start the branch reads all
        of them, stream k mod N with weight 0.7, and a stream keeps 0.96 of itself.
    mixes: whether the streams are mixed (mHC) or not (iHC).
    sinkhorn_iters: number of normalizations of columns and rows.
    eps: added to reads and divisors, as in DeepSeek-V4's kernels.
    is_biased: whether the initial biases are the paper's (Appendix A.6) instead: 3 for the read of stream k mod N and
        for a stream's share of itself, -3 for the others. The reads of four streams then sum to 1.09.
    """

    decayed = ("fn",)
    fn: nn.Parameter
    base: nn.Parameter
    scale: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        hc_mult: int,
        sub_layer: int,
        mixes: bool = True,
        sinkhorn_iters: int = 20,
        eps: float = 1e-6,
        is_biased: bool = False,
    ):
        super().__init__(hidden_size, hc_mult, sub_layer)
        self.mixes, self.sinkhorn_iters, self.eps, self.is_biased = mixes, sinkhorn_iters, eps, is_biased
        self.register_initial_values()

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return the initial values, float32. Without the paper's biases they keep a Pre-Norm model's function.

        Reads then sum to 1, writes are 1, and the rows of the mix sum to 1.
        """
        n, home = self.hc_mult, self.sub_layer % self.hc_mult
        reads, keeps, gives = (
            read_logits(n, home, self.eps),
            math.log(KEPT_SHARE),
            math.log((1 - KEPT_SHARE) / (n - 1)),
        )
        if self.is_biased:
            reads, keeps, gives = [BIAS if i == home else -BIAS for i in range(n)], BIAS, -BIAS
        base = [*reads, *[0.0] * n]
        if self.mixes:
            base += [keeps if i == j else gives for i in range(n) for j in range(n)]
        return {
            "fn": torch.zeros(len(base), n * self.hidden_size, dtype=torch.float32),
            "base": torch.tensor(base, dtype=torch.float32),
            "scale": torch.full((3 if self.mixes else 2,), 0.01, dtype=torch.float32),
        }

    @property
    def settings(self) -> tuple[bool, int, float]:
        """Return the arguments of `coefficients` besides tensors."""
        return self.mixes, self.sinkhorn_iters, self.eps

    def coefficients(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """Return H_pre and H_post `[B, S, N]` and H_res `[B, S, N, N]` (None for iHC), float32."""
        dtype = compute_dtype(streams.dtype)
        fn, base, scale = (parameter.to(dtype) for parameter in (self.fn, self.base, self.scale))
        return coefficients(streams.to(dtype), fn, base, scale, *self.settings)

    def matrices(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return H_pre and H_res as A of `HyperConnection.matrices`, `[B, S, N, 1 + N]`, and H_post `[B, S, N]`."""
        read, write, mix = self.coefficients(streams)
        if mix is None:
            mix = torch.eye(self.hc_mult, dtype=read.dtype, device=read.device).expand(*read.shape, -1)
        return torch.cat([read.unsqueeze(-1), mix.transpose(-1, -2)], dim=-1), write

    def read_and_mix(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        read, write, mix = self.coefficients(streams)
        return *read_and_mix_deviations(streams, read, mix), write

    def forward(self, streams: Streams) -> tuple[torch.Tensor, Writer]:
        """Return the branch input and the carry, by the fused kernels or in torch (`set_hc_implementation`)."""
        values = streams.written()
        if torch.jit.is_tracing() or is_transformed() or chosen_implementation(values, _run_one) == "torch":
            return super().forward(streams)
        with without_autocast(values):
            parameters = (parameter.float() for parameter in (self.fn, self.base, self.scale))
            handed_on, branch_input, write, mix = _Width.apply(self.settings, values, *parameters)
        return branch_input, ManifoldCarry(handed_on, write, mix, self.mixes)


class _Width(torch.autograd.Function):
    """A width connection by the fused kernels: the streams, handed on, the branch input, H_post and H_res."""

    @staticmethod
    def forward(ctx, settings, streams, fn, base, scale):
        from .mhc_triton import width_forward

        branch_input, read, write, mix, predicted, deviation = width_forward(streams, fn, base, scale, *settings)
        ctx.settings = settings
        ctx.set_materialize_grads(False)  # or the mix would get a gradient of zeros
        ctx.save_for_backward(streams, fn, base, scale, read, mix, predicted, deviation)
        ctx.mark_non_differentiable(mix)
        return streams.view_as(streams), branch_input, write, mix

    @staticmethod
    def backward(ctx, grad_streams, grad_input, grad_write, _):
        from .mhc_triton import projection_backward, width_backward

        streams, fn, base, scale, *saved = ctx.saved_tensors
        # of outputs that nothing was made of
        if grad_streams is None:
            grad_streams = torch.zeros_like(streams)
        if grad_input is None:
            grad_input = torch.zeros_like(streams[..., 0, :])
        if grad_write is None:
            grad_write = torch.zeros_like(saved[0])
        if needs_autograd():
            grads = (grad_streams, grad_input, grad_write)
            with without_autocast(grad_streams):
                return None, *gradients(partial(_width, ctx.settings), (streams, fn, base, scale), grads)
        with without_autocast(grad_streams):
            of_streams, of_others, of_products = width_backward(
                streams, fn, base, scale, *ctx.settings, *saved, grad_streams, grad_input, grad_write
            )
            of_fn = projection_backward(streams, of_products) if ctx.needs_input_grad[2] else None
            of_others = of_others.flatten(0, -2).sum(0)
        return None, of_streams, of_fn, *of_others.split_with_sizes([len(base), len(scale)])


class _Depth(torch.autograd.Function):
    """A depth connection by the fused kernels."""

    @staticmethod
    def forward(ctx, mixes, streams, write, mix, branch_output):
        from .mhc_triton import depth_forward

        ctx.save_for_backward(write, branch_output)
        return depth_forward(streams, write, mix, mixes, branch_output)

    @staticmethod
    def backward(ctx, grad):
        from .mhc_triton import depth_backward

        with without_autocast(grad):
            if needs_autograd():
                grad_write, grad_output = gradients(_depth, ctx.saved_tensors, (grad,))
            else:
                grad_write, grad_output = depth_backward(grad, *ctx.saved_tensors)
        return None, grad, grad_write, None, grad_output


def _run_one(device: torch.device) -> None:
    """Read small streams by the kernels."""
    from .mhc_triton import width_forward

    fn, base, scale = (torch.zeros(shape, device=device) for shape in ((4, 32), 4, 2))
    width_forward(torch.zeros(1, 1, 2, 16, device=device), fn, base, scale, False, 1, 1e-6)


def _width(
    settings: tuple[bool, int, float], streams: torch.Tensor, fn: torch.Tensor, base: torch.Tensor, scale: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return H_res x, the branch input and H_post by the algebra; `_Width` receives their gradients."""
    read, write, mix = coefficients(streams.float(), fn, base, scale, *settings)
    branch_input, mixed = read_and_mix_deviations(streams, read, mix)
    return mixed, branch_input, write


def _depth(write: torch.Tensor, branch_output: torch.Tensor) -> tuple[torch.Tensor]:
    """Return the addition of a depth connection to the mixed streams."""
    return (write.unsqueeze(-1) * branch_output.to(write.dtype).unsqueeze(-2),)


def coefficients(
    streams: torch.Tensor,
    fn: torch.Tensor,
    base: torch.Tensor,
    scale: torch.Tensor,
    mixes: bool,
    sinkhorn_iters: int,
    eps: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Return H_pre, H_post and H_res of streams, all in one dtype; see `ManifoldHyperConnection`."""
    n = streams.shape[-2]
    logits = normed_projection(streams, fn, eps)
    read = torch.sigmoid(scale[0] * logits[..., :n] + base[:n]) + eps
    write = 2 * torch.sigmoid(scale[1] * logits[..., n : 2 * n] + base[n : 2 * n])
    if not mixes:
        return read, write, None
    mix = (scale[2] * logits[..., 2 * n :] + base[2 * n :]).unflatten(-1, (n, n))
    return read, write, sinkhorn(mix, sinkhorn_iters, eps).transpose(-1, -2)


def read_and_mix_deviations(
    streams: torch.Tensor, read: torch.Tensor, mix: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return H_pre x `[B, S, D]`, in the streams' dtype, and H_res x `[B, S, N, D]`, in the coefficients' dtype."""
    values = streams.to(read.dtype)
    mean, deviations = centred(values)
    branch_input = read_streams(read, mean, deviations).to(streams.dtype)
    if mix is None:
        return branch_input, values
    mixed = products_on(streams.device).mixed(mix.transpose(-1, -2), deviations)
    return branch_input, mean.unsqueeze(-2) + mixed


def read_logits(n: int, favoured: int, eps: float) -> list[float]:
    """Return logits whose sigmoids plus eps are 0.7 for the favoured stream and sum to 1."""
    others = (1 - FAVOURED_READ) / (n - 1)
    return [logit((FAVOURED_READ if i == favoured else others) - eps) for i in range(n)]


def manifold(layer: Any, sub_layer: int, sub_layers: int, mixes: bool = True) -> ManifoldHyperConnection:
    """Make the connection around sub-layer k of a layer, by its config."""
    config, is_biased = layer.config, layer.config.hc_start == "biased"
    settings = mixes, config.hc_sinkhorn_iters, config.hc_eps, is_biased
    return ManifoldHyperConnection(config.hidden_size, config.hc_mult, sub_layer, *settings)


def identity(layer: Any, sub_layer: int, sub_layers: int) -> ManifoldHyperConnection:
    """Make the connection around sub-layer k of a layer, with unmixed streams."""
    return manifold(layer, sub_layer, sub_layers, mixes=False)
