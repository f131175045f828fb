# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Attention Residuals (arXiv 2603.15031): a softmax over depth in the place of the residual sum.

For one token, v_0 is the embedding. v_1 .. v_{M-1} are the outputs of the sub-layers so far (full form), or the sums
of blocks of them, the current block included. A sub-layer with the query w reads

    s_i = w . v_i / sqrt(mean(v_i^2) + eps)      p = softmax(s)

    "mean"   h = sum_i p_i v_i                   the paper's, for training from scratch
    "sum"    h = r + sum_i (M p_i - 1) v_i       r: the sum of the v_i, rounded as the residual stream of the base

The second is M times the first. The norm of the branch removes this factor up to its eps. M p_i is computed as
M exp(s_i - max) / sum exp. At w = 0 it is exactly 1, so h is exactly r, and the model equals its Pre-Norm base bit for
bit. The weight of the paper's norm of v_i is part of w.

The streams are `[B, S, 1 + M, D]`: r, then the values. M grows. Within a decoder layer the outputs stay beside the
layer's input, so that streams are copied once a layer.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .computing import chosen_implementation, gradients, is_transformed, needs_autograd
from .connection import (
    Connection,
    apply_recorded,
    as_new_output,
    broadcast_output,
    compute_dtype,
    expand_streams,
    without_autocast,
)
from .connection_weights import WideModule

MAX_TRITON_SIZE = 2**14  # D, padded to a power of two: more values of four rows don't fit into registers


@dataclass(eq=False)
class Values:
    """Streams on their way from sub-layer to sub-layer, and the carry of one.

    residual: r, `[B, S, D]`.
    values: v_0 .. v_{M-1} in this order, in tensors `[B, S, m, D]`.
    opens_block: whether the next written output begins a new value.
    """

    residual: torch.Tensor
    values: tuple[torch.Tensor, ...]
    opens_block: bool = False

    def __len__(self) -> int:
        """Return B, as a tensor does, for PEFT."""
        return len(self.residual)

    @classmethod
    def of_streams(cls, streams: torch.Tensor) -> "Values":
        """Return views of streams `[B, S, 1 + M, D]`."""
        residual, values = streams.split((1, streams.shape[-2] - 1), dim=-2)  # of which the gradient is one `cat`
        return cls(residual.squeeze(-2), (values,))

    def written(self) -> torch.Tensor:
        """Return the streams `[B, S, 1 + M, D]`."""
        return torch.cat([self.residual.unsqueeze(-2), *self.values], dim=-2)

    def write(self, branch_output: torch.Tensor) -> "Values":
        """Add a branch output `[B, S, D]` to r, and to the last value unless it is the first of its block."""
        branch_output = broadcast_output(branch_output, self.residual.shape)
        residual, value = self.residual + branch_output, branch_output.unsqueeze(-2)
        if self.opens_block:
            return Values(residual, (*self.values, value))
        *before, last = self.values
        if last.shape[-2] > 1:
            closed, last = last.split((last.shape[-2] - 1, 1), dim=-2)
            before.append(closed)
        return Values(residual, (*before, last + value))

    def read(self, query: torch.Tensor, form: str, eps: float) -> torch.Tensor:
        """Return h, `[B, S, D]`, in the dtype of r, by the fused kernels or in torch (`set_hc_implementation`)."""
        with without_autocast(self.residual):
            tensors = query.to(compute_dtype(self.residual.dtype)), self.residual, *self.values
            if self._is_read_by_kernels():
                first, *others = self.values
                last = torch.cat(others, dim=-2) if len(others) > 1 else next(iter(others), None)
                return _FusedRead.apply(form == "sum", eps, *tensors[:2], first, last)
            return apply_recorded(_Read, form == "sum", eps, *tensors)

    def _is_read_by_kernels(self) -> bool:
        if torch.jit.is_tracing() or is_transformed():
            return False
        # the kernels hold a row at a time, as of one stream
        return chosen_implementation(self.residual.unsqueeze(-2), _run_one, MAX_TRITON_SIZE) == "triton"


class AttentionResidual(Connection):
    """The attention residual around one sub-layer.

    hidden_size, sub_layer: see `Connection`. Sub-layer 0 reads one value, the embedding, so its query has no effect.
    block: number of sub-layers whose outputs make one value; 1 for the full form.
    form: "sum" or "mean".
    eps: of the norm of the values.
    """

    query: nn.Parameter

    def __init__(self, hidden_size: int, sub_layer: int, block: int = 1, form: str = "sum", eps: float = 1e-6):
        super().__init__(hidden_size, 1, sub_layer)
        self.opens_block, self.form, self.eps = sub_layer % block == 0, form, eps
        self.register_initial_values()

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return the query of equal weights, float32."""
        return {"query": torch.zeros(self.hidden_size, dtype=torch.float32)}

    def expand_streams(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return r and v_0, both of them the hidden states `[B, S, D]`: `[B, S, 2, D]`."""
        return expand_streams(hidden_states, 2)

    def take(self, streams: torch.Tensor) -> Values:
        """Return streams `[B, S, 1 + M, D]` as the input of `forward`."""
        return Values.of_streams(streams)

    def forward(self, streams: Values) -> tuple[torch.Tensor, Values]:
        """Return h and the carry: the width connection."""
        read = streams.read(self.query, self.form, self.eps)
        return read, Values(streams.residual, streams.values, self.opens_block)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, opens_block={self.opens_block}, form={self.form!r}"


class AttentionReadout(WideModule):
    """The readout: the last values, read as by a sub-layer.

    hidden_size: D. form, eps: as for `AttentionResidual`.
    """

    query: nn.Parameter

    def __init__(self, hidden_size: int, form: str = "sum", eps: float = 1e-6):
        super().__init__()
        self.hidden_size, self.form, self.eps = hidden_size, form, eps
        self.register_initial_values()

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return the query of equal weights, float32."""
        return {"query": torch.zeros(self.hidden_size, dtype=torch.float32)}

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Return the hidden states `[B, S, D]` of streams `[B, S, 1 + M, D]`, in their dtype."""
        return Values.of_streams(streams).read(self.query, self.form, self.eps)


class _Read(torch.autograd.Function):
    """h, `[B, S, D]`. The backward keeps the values in their own dtype, and computes the rest again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        adds_residual: bool, eps: float, query: torch.Tensor, residual: torch.Tensor, *values: torch.Tensor
    ) -> torch.Tensor:
        wide = [value.to(query.dtype) for value in values]
        weights = _weights(_scores(wide, query, eps)[0])
        weights = weights - 1 if adds_residual else weights / weights.shape[-1]
        read: Any = sum(
            (weight * value).sum(-2) for weight, value in zip(_by_tensor(weights, wide), wide, strict=True)
        )
        return as_new_output((residual.to(query.dtype) + read if adds_residual else read).to(residual.dtype))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.adds_residual, ctx.eps, query, _, *values = inputs
        ctx.save_for_backward(query, *values)

    @staticmethod
    def backward(ctx, grad_output):
        query, *values = ctx.saved_tensors
        wide, grad = [value.to(query.dtype) for value in values], grad_output.to(query.dtype).unsqueeze(-2)
        scores, deviation = _scores(wide, query, ctx.eps)
        weights = _weights(scores)
        count = weights.shape[-1]
        of_weights = torch.cat([(value * grad).sum(-1) for value in wide], dim=-1)
        of_scores = weights * (of_weights - (weights * of_weights).mean(-1, keepdim=True))
        if ctx.adds_residual:
            weights = weights - 1
        else:
            weights, of_scores = weights / count, of_scores / count
        scaled = of_scores * deviation
        along = scaled * scores * deviation / query.shape[-1]
        of_query, of_values = torch.zeros_like(query), []
        for value, weight, by_query, by_value in zip(
            wide, *(_by_tensor(factors, wide) for factors in (weights, scaled, along)), strict=True
        ):
            of_query = of_query + (by_query * value).flatten(0, -2).sum(0)
            of_value = weight * grad
            of_values.append(of_value.addcmul_(by_query, query).addcmul_(by_value, value, value=-1))
        of_values = [of_value.to(value.dtype) for of_value, value in zip(of_values, values, strict=True)]
        return None, None, of_query, grad_output if ctx.adds_residual else None, *of_values


class _FusedRead(torch.autograd.Function):
    """h, `[B, S, D]`, by the fused kernels. The backward keeps the values, and the scores and norms of each token."""

    @staticmethod
    def forward(ctx, adds_residual, eps, query, residual, first, last):
        from .attnres_triton import read_forward

        read, *of_softmax = read_forward(adds_residual, eps, query, residual, first, last)
        ctx.adds_residual, ctx.eps = adds_residual, eps
        ctx.save_for_backward(query, first, last, *of_softmax)
        return read

    @staticmethod
    def backward(ctx, grad_output):
        from .attnres_triton import read_backward

        query, first, last, *of_softmax = ctx.saved_tensors
        with without_autocast(grad_output):
            if needs_autograd():

                def read(query, *values):
                    residual, present = torch.zeros_like(grad_output), (v for v in values if v is not None)
                    return (_Read.forward(ctx.adds_residual, ctx.eps, query, residual, *present),)

                of_query, of_first, of_last = gradients(read, (query, first, last), (grad_output,))
            else:
                of_first, of_last, of_query = read_backward(
                    ctx.adds_residual, query, first, last, *of_softmax, grad_output
                )
        of_residual = grad_output if ctx.adds_residual else None
        return None, None, of_query, of_residual, of_first, None if last is None else of_last


def _run_one(device: torch.device) -> None:
    """Read small values by the kernels."""
    from .attnres_triton import read_forward

    residual, values = torch.zeros(1, 1, 16, device=device), torch.zeros(1, 1, 2, 16, device=device)
    read_forward(True, 1e-6, residual[0, 0], residual, values, None)


def _scores(values: list[torch.Tensor], query: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Return s and 1 / sqrt(mean(v^2) + eps) of values `[B, S, m, D]`: `[B, S, M]` each."""
    deviation = torch.rsqrt(torch.cat([value.square().mean(-1) for value in values], dim=-1) + eps)
    return torch.cat([(value * query).sum(-1) for value in values], dim=-1) * deviation, deviation


def _weights(scores: torch.Tensor) -> torch.Tensor:
    """Return M p of scores `[B, S, M]`; of equal scores exactly 1."""
    exponentials = (scores - scores.detach().amax(-1, keepdim=True)).exp()
    return scores.shape[-1] * exponentials / exponentials.sum(-1, keepdim=True)


def _by_tensor(factors: torch.Tensor, values: list[torch.Tensor]) -> tuple[torch.Tensor, ...]:
    """Return factors `[B, S, M]` as `[B, S, m, 1]` for each tensor of values."""
    return factors.unsqueeze(-1).split([value.shape[-2] for value in values], dim=-2)


def attention_residual(layer: Any, sub_layer: int, sub_layers: int) -> AttentionResidual:
    """Make the connection around sub-layer k of a layer, of the config's kind.

    Raises `ValueError` for a layer with a sub-layer that reads nothing.
    """
    config = layer.config
    if not all(part.reads for part in layer.parts):
        raise ValueError(
            f"connection is 'attnres', which reads values for every sub-layer; one of {type(layer).__name__} reads "
            f"nothing. Choose another connection."
        )
    return AttentionResidual(config.hidden_size, sub_layer, config.hc_block, config.hc_attention, config.hc_eps)


def attention_readout(layer: Any) -> AttentionReadout:
    """Make the readout of a last layer, by its config."""
    config = layer.config
    return AttentionReadout(config.hidden_size, config.hc_attention, config.hc_eps)
