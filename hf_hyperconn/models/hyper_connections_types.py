# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""What goes into a step (see `hyper_connections_step.py`) and what comes out of it, whatever computes it."""

from collections.abc import Callable
from typing import NamedTuple

import torch

OVERFLOW = 2.0**100  # beyond what float16 holds


def of_every_token(branch_output: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
    """A branch output of the shape that an addition would broadcast it to, `[B, S, D]`."""
    if not torch.jit.is_tracing() and branch_output.shape == shape:
        return branch_output
    return branch_output.expand(shape)


def without_overflow(branch_output: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A branch output in the compute dtype, whose products with 0 are 0, to be written to streams of a dtype.

    Families that train in float16 clamp streams that overflow; a branch that did so leaves others as they are.
    """
    return branch_output.clamp(-OVERFLOW, OVERFLOW) if dtype == torch.float16 else branch_output


class CoefficientParameters(NamedTuple):
    """What a width connection computes its coefficients with, in the compute dtype.

    static_alpha: `[N, N+1]`. static_beta: `[N]`.
    fn: `[N+2, D]`, the norm's weight folded in; None for static coefficients, which have nothing of what follows.
    offset: `[N+2]`, added to the prediction; or None.
    alpha_scale, beta_scale: `[1]`.
    eps: of the norm. centred: whether the norm takes off the mean. tanh: whether the prediction goes through tanh.
    """

    static_alpha: torch.Tensor
    static_beta: torch.Tensor
    fn: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    alpha_scale: torch.Tensor | None = None
    beta_scale: torch.Tensor | None = None
    eps: float = 0.0
    centred: bool = False
    tanh: bool = True

    def static(self) -> torch.Tensor:
        """`[N, N+2]`."""
        return torch.cat([self.static_alpha, self.static_beta.unsqueeze(-1)], dim=-1)

    def scale(self) -> torch.Tensor:
        """`[N+2]`, of dynamic coefficients."""
        assert self.alpha_scale is not None
        assert self.beta_scale is not None
        return torch.cat([self.alpha_scale.expand(self.static_alpha.shape[-1]), self.beta_scale])

    def squash(self, predicted: torch.Tensor) -> torch.Tensor:
        """What is scaled and added to the static coefficients."""
        logits = predicted if self.offset is None else predicted + self.offset
        return logits.tanh() if self.tanh else logits


class Read(NamedTuple):
    """What reading streams gives.

    branch_input: `[B, S, D]`, in the dtype of the streams.
    coefficients: `[B, S, N, N+2]`, or `[N, N+2]` when static.
    predicted: norm(H) @ fn, without offset, `[B, S, N, N+2]`; or None.
    deviation, mean: the norm's 1 / sqrt(...) and what it takes off, `[B, S, N]`; or None.
    """

    branch_input: torch.Tensor
    coefficients: torch.Tensor
    predicted: torch.Tensor | None = None
    deviation: torch.Tensor | None = None
    mean: torch.Tensor | None = None


class CoefficientGrads(NamedTuple):
    """The gradients of a `CoefficientParameters`: of [static_alpha | static_beta] `[N, N+2]`, and of what is not None.

    That of static_beta is left out when the coefficients are static.
    """

    static: torch.Tensor
    fn: torch.Tensor | None = None
    offset: torch.Tensor | None = None
    scale: torch.Tensor | None = None


class StepGrads(NamedTuple):
    """The gradients of a step.

    streams: of A_r'^T S when the step wrote, of S when it only read, `[B, S, N, D]`.
    parameters: None when it did not read.
    written_beta, branch_output: of b' `[B, S, N]` and f `[B, S, D]`; None when it did not write.
    """

    streams: torch.Tensor
    parameters: CoefficientGrads | None
    written_beta: torch.Tensor | None
    branch_output: torch.Tensor | None


class Kernels(NamedTuple):
    """An implementation of steps.

    step_forward: H and what reading it gives, from S, A' and f (None when nothing is written) and the parameters of
        the coefficients (None when nothing is read).
    step_backward: `StepGrads`, from the same, the result of reading, and the gradients of what the step gave: of the
        streams handed on, of x and of b (None for static coefficients). S is needed only when the step reads. The
        gradient of `fn` is left out when it is not wanted.
    """

    step_forward: Callable
    step_backward: Callable
