# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The halves of a step (see `hyper_connections_step.py`) and their backwards, in plain torch.

Each has two forms. In eager mode on a CPU, small matrix products. Elsewhere sums written out over streams and
coefficients, which a compiler fuses into a few passes and which no setting of matrix products can make lossy.

Sums over the streams are float32 (float64 for float64 streams); what is written is rounded once. Coefficients of one
token are `[N, N+2]`: the columns of A_m, A_r and b; those of SHC have no token dimensions.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch


class Reader(NamedTuple):
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

    @property
    def static(self) -> torch.Tensor:
        """`[N, N+2]`."""
        return torch.cat([self.static_alpha, self.static_beta.unsqueeze(-1)], dim=-1)

    @property
    def scale(self) -> torch.Tensor:
        """`[N+2]`."""
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


class StepGrads(NamedTuple):
    """The gradients of a step.

    streams: of A_r'^T S when the step wrote, of S when it only read, `[B, S, N, D]`.
    coefficients, predicted: of the coefficients that it read with and of their prediction, `[B, S, N, N+2]`; or None.
    written_beta, branch_output: of b' `[B, S, N]` and f `[B, S, D]`; or None.
    """

    streams: torch.Tensor
    coefficients: torch.Tensor | None
    predicted: torch.Tensor | None
    written_beta: torch.Tensor | None
    branch_output: torch.Tensor | None


class Kernels(NamedTuple):
    """An implementation of steps: `step_forward`, `step_backward` and `projection_backward`."""

    step_forward: Callable
    step_backward: Callable
    projection_backward: Callable


def step_forward(
    streams: torch.Tensor,
    coefficients: torch.Tensor | None,
    branch_output: torch.Tensor | None,
    reader: Reader | None,
) -> tuple[torch.Tensor, Read | None]:
    """H and what reading it gives; `coefficients` and `branch_output` are None when nothing is written."""
    if coefficients is not None:
        streams = write(streams, coefficients, branch_output)
    return streams, None if reader is None else read(streams, reader)


def step_backward(
    streams: torch.Tensor | None,
    coefficients: torch.Tensor | None,
    branch_output: torch.Tensor | None,
    reader: Reader | None,
    result: Read | None,
    grad_streams: torch.Tensor,
    grad_input: torch.Tensor | None,
    grad_beta: torch.Tensor | None,
) -> StepGrads:
    """The gradients of a step from those of what it gave; `streams` is needed only when it read."""
    grad_coefficients = grad_predicted = grad_written_beta = grad_output = None
    if reader is not None:
        if coefficients is not None:
            streams = write(streams, coefficients, branch_output)
        grad_streams, grad_coefficients, grad_predicted = read_backward(
            streams, reader, result, grad_streams, grad_input, grad_beta
        )
    if coefficients is not None:
        grad_written_beta, grad_output = write_backward(grad_streams, coefficients, branch_output)
    return StepGrads(grad_streams, grad_coefficients, grad_predicted, grad_written_beta, grad_output)


def write(streams: torch.Tensor, coefficients: torch.Tensor, branch_output: torch.Tensor) -> torch.Tensor:
    """H = A_r^T S + b (outer) f, `[B, S, N, D]`, in the dtype that `streams + branch_output` would have."""
    values, output = streams.to(coefficients.dtype), branch_output.to(coefficients.dtype)
    dtype = torch.promote_types(streams.dtype, branch_output.dtype)
    mix, beta = coefficients[..., 1:-1], coefficients[..., -1:]
    if uses_matrix_products(streams.device):
        return (mix.transpose(-1, -2) @ values).addcmul_(beta, output.unsqueeze(-2)).to(dtype)
    rows = values.unbind(-2)
    written = [_weighted(mix[..., j], rows) + beta[..., j, :] * output for j in range(len(rows))]
    return torch.stack(written, dim=-2).to(dtype)


def write_backward(
    grad: torch.Tensor, coefficients: torch.Tensor, branch_output: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the gradient of H, those of b `[B, S, N]` and of f `[B, S, D]`; that of A_r^T S is the gradient of H."""
    values, output = grad.to(coefficients.dtype), branch_output.to(coefficients.dtype)
    beta = coefficients[..., -1]
    if uses_matrix_products(grad.device):
        grad_beta, grad_output = values @ output.unsqueeze(-1), beta.unsqueeze(-2) @ values
        return grad_beta.squeeze(-1), grad_output.squeeze(-2).to(branch_output.dtype)
    rows = values.unbind(-2)
    grad_beta = torch.stack([(row * output).sum(-1) for row in rows], dim=-1)
    return grad_beta, _weighted(beta, rows).to(branch_output.dtype)


def read(streams: torch.Tensor, reader: Reader) -> Read:
    """The branch input x = A_m^T H of streams `[B, S, N, D]`, and the coefficients."""
    values = streams.to(reader.static_alpha.dtype)
    if reader.fn is None:
        return Read(_read(values, reader.static).to(streams.dtype), reader.static)
    matrix = uses_matrix_products(streams.device)
    size = streams.shape[-1]
    mean = values.mean(-1) if reader.centred else None
    if matrix:
        squares, products = torch.linalg.vector_norm(values, dim=-1).square(), values @ reader.fn.transpose(0, 1)
    else:
        rows = values.unbind(-2)
        squares = torch.stack([row.square().sum(-1) for row in rows], dim=-1)
        products = torch.stack(
            [torch.stack([(row * fn).sum(-1) for fn in reader.fn.unbind(0)], dim=-1) for row in rows], dim=-2
        )
    variance = squares / size
    if mean is not None:
        variance = variance - mean.square()
        products = products - mean.unsqueeze(-1) * reader.fn.sum(-1)
    deviation = torch.rsqrt(variance + reader.eps)
    predicted = products * deviation.unsqueeze(-1)
    coefficients = reader.static + reader.scale * reader.squash(predicted)
    return Read(_read(values, coefficients).to(streams.dtype), coefficients, predicted, deviation, mean)


def read_backward(
    streams: torch.Tensor,
    reader: Reader,
    result: Read,
    grad_mixed: torch.Tensor,
    grad_input: torch.Tensor,
    grad_beta: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """From the gradients of A_r^T H, of x and of b, those of H, of the coefficients and of the prediction.

    grad_beta: `[B, S, N]`, or None for static coefficients, whose gradient then lacks that of b.
    The gradients of coefficients and prediction are `[B, S, N, N+2]`, of each token.
    """
    coefficients = result.coefficients
    values, mixed, inputs = (x.to(coefficients.dtype) for x in (streams, grad_mixed, grad_input))
    read_weights, mix = coefficients[..., 0], coefficients[..., 1:-1]
    if grad_beta is None:
        grad_beta = values.new_zeros(values.shape[:-1])
    if uses_matrix_products(streams.device):
        grad_coefficients = torch.cat(
            [values @ inputs.unsqueeze(-1), values @ mixed.transpose(-1, -2), grad_beta.unsqueeze(-1)], dim=-1
        )
        grad = (mix @ mixed).addcmul_(read_weights.unsqueeze(-1), inputs.unsqueeze(-2))
        if reader.fn is None:
            return grad.to(streams.dtype), grad_coefficients, None
        grad_predicted = _predicted_backward(reader, result, grad_coefficients)
        by_value, by_constant = _norm_backward(reader, result, grad_predicted, streams.shape[-1])
        scaled = grad_predicted * result.deviation.unsqueeze(-1)
        grad.flatten(0, -2).addmm_(scaled.flatten(0, -2), reader.fn)
        grad.addcmul_(values, by_value.unsqueeze(-1))
        if by_constant is not None:
            grad.add_(by_constant.unsqueeze(-1))
        return grad.to(streams.dtype), grad_coefficients, grad_predicted

    rows, mixed_rows = values.unbind(-2), mixed.unbind(-2)
    grad_coefficients = torch.stack(
        [
            torch.stack([(row * other).sum(-1) for other in (inputs, *mixed_rows)] + [grad_beta[..., i]], dim=-1)
            for i, row in enumerate(rows)
        ],
        dim=-2,
    )
    grads = [read_weights[..., i, None] * inputs + _weighted(mix[..., i, :], mixed_rows) for i in range(len(rows))]
    if reader.fn is None:
        return torch.stack(grads, dim=-2).to(streams.dtype), grad_coefficients, None
    grad_predicted = _predicted_backward(reader, result, grad_coefficients)
    by_value, by_constant = _norm_backward(reader, result, grad_predicted, streams.shape[-1])
    scaled = grad_predicted * result.deviation.unsqueeze(-1)
    for i, row in enumerate(rows):
        through_norm = _weighted(scaled[..., i, :], reader.fn.unbind(0)) + by_value[..., i, None] * row
        grads[i] = grads[i] + through_norm
        if by_constant is not None:
            grads[i] = grads[i] + by_constant[..., i, None]
    return torch.stack(grads, dim=-2).to(streams.dtype), grad_coefficients, grad_predicted


def projection_backward(
    streams: torch.Tensor,
    coefficients: torch.Tensor | None,
    branch_output: torch.Tensor | None,
    result: Read,
    grad_predicted: torch.Tensor,
) -> torch.Tensor:
    """The gradient of `fn`, `[N+2, D]`, from that of the prediction."""
    if coefficients is not None:
        streams = write(streams, coefficients, branch_output)
    scaled = (grad_predicted * result.deviation.unsqueeze(-1)).flatten(0, -2)
    values = streams.to(scaled.dtype).flatten(0, -2)
    grad = scaled.transpose(0, 1) @ values
    if result.mean is not None:
        grad = grad - (scaled * result.mean.reshape(-1, 1)).sum(0).unsqueeze(-1)
    return grad


def _read(values: torch.Tensor, coefficients: torch.Tensor) -> torch.Tensor:
    if uses_matrix_products(values.device):
        return (coefficients[..., :1].transpose(-1, -2) @ values).squeeze(-2)
    return _weighted(coefficients[..., 0], values.unbind(-2))


def _weighted(weights: torch.Tensor, rows: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """Sum of rows `[B, S, D]` with weights `[B, S, N]` or `[N]`."""
    return sum(weights[..., i, None] * row for i, row in enumerate(rows))


def _predicted_backward(reader: Reader, result: Read, grad_coefficients: torch.Tensor) -> torch.Tensor:
    scaled = grad_coefficients * reader.scale
    return scaled * (1 - reader.squash(result.predicted).square()) if reader.tanh else scaled


def _norm_backward(
    reader: Reader, result: Read, grad_predicted: torch.Tensor, size: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """What the norm adds to the gradient of H, beside its input: a multiple of H and a constant, `[B, S, N]` each."""
    by_value = -result.deviation.square() * (grad_predicted * result.predicted).sum(-1) / size
    if result.mean is None:
        return by_value, None
    of_mean = result.deviation * (grad_predicted * reader.fn.sum(-1)).sum(-1) / size
    return by_value, -of_mean - by_value * result.mean


KERNELS = Kernels(step_forward, step_backward, projection_backward)


def uses_matrix_products(device: torch.device) -> bool:
    """Whether small matrix products on `device` are the faster form and keep every bit of their operands."""
    if torch.compiler.is_compiling() or device.type != "cpu":
        return False
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # the precision was set per backend, so it may be reduced
        return False


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which streams of `dtype` are computed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
