# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Steps (see `hyper_connections_step.py`) in plain torch, their sums as small matrix products or written out.

Matrix products are few operations, the faster form in eager mode. A setting of the process can make them lossy; sums
written out never are, and a compiler fuses them. Either way sums over the streams are float32 (float64 for float64
streams), and what is written is rounded once. Coefficients of one token are `[N, N+2]`: the columns of A_m, A_r and b;
those of SHC have no token dimensions.
"""

from collections.abc import Callable
from functools import reduce
from operator import add
from typing import NamedTuple

import torch

from .hyper_connections_types import (
    CoefficientGrads,
    CoefficientParameters,
    Kernels,
    Read,
    StepGrads,
    without_overflow,
)

EXACT_AT_HIGHEST = ("cpu", "cuda", "xpu", "mps", "meta")  # whose float32 matrix products then are; a TPU's are not


class Products(NamedTuple):
    """How a step makes its sums over streams, channels and tokens.

    mixed: from weights `[..., N, M]` and values `[..., N, D]`, weighted sums of the values, `[..., M, D]`.
    dots: from values `[..., N, D]` and others `[..., M, D]` or `[M, D]`, their products over D, `[..., N, M]`.
    add_mixed: adds to `[B, S, N, D]`, in place, sums of `fn` `[M, D]` with weights `[B, S, N, M]`.
    over_tokens: from weights `[B, S, N, M]` and values `[B, S, N, D]`, sums over all but M and D, `[M, D]`.
    """

    mixed: Callable
    dots: Callable
    add_mixed: Callable
    over_tokens: Callable


def steps_of(products: Products) -> Kernels:
    """Steps that make their sums so."""

    def step_forward(
        streams: torch.Tensor,
        coefficients: torch.Tensor | None,
        branch_output: torch.Tensor | None,
        parameters: CoefficientParameters | None,
    ) -> tuple[torch.Tensor, Read | None]:
        if coefficients is not None:
            streams = write(streams, coefficients, branch_output, products)
        return streams, None if parameters is None else read(streams, parameters, products)

    def step_backward(
        streams: torch.Tensor | None,
        coefficients: torch.Tensor | None,
        branch_output: torch.Tensor | None,
        parameters: CoefficientParameters | None,
        result: Read | None,
        grad_streams: torch.Tensor,
        grad_input: torch.Tensor | None,
        grad_beta: torch.Tensor | None,
        wants_fn: bool,
    ) -> StepGrads:
        of_parameters, of_beta, of_output = None, None, None
        if parameters is not None:
            if coefficients is not None:
                streams = write(streams, coefficients, branch_output, products)
            grads = grad_streams, grad_input, grad_beta
            grad_streams, of_parameters = read_backward(streams, parameters, result, *grads, wants_fn, products)
        if coefficients is not None:
            of_beta, of_output = write_backward(grad_streams, coefficients, branch_output, products)
        return StepGrads(grad_streams, of_parameters, of_beta, of_output)

    return Kernels(step_forward, step_backward)


def coefficient_grads(
    parameters: CoefficientParameters,
    result: Read,
    grad_coefficients: torch.Tensor,
    grad_predicted: torch.Tensor | None,
    grad_fn: torch.Tensor | None,
) -> CoefficientGrads:
    """From the gradients of every token's coefficients and prediction, `[B, S, N, N+2]`, and that of `fn`."""
    of_static = grad_coefficients.flatten(0, -3).sum(0)
    if parameters.fn is None:
        return CoefficientGrads(of_static)
    of_scale = (grad_coefficients * parameters.squash(result.predicted)).flatten(0, -2).sum(0)
    of_offset = None if parameters.offset is None else grad_predicted.flatten(0, -2).sum(0)
    return CoefficientGrads(of_static, grad_fn, of_offset, of_scale)


def write(
    streams: torch.Tensor, coefficients: torch.Tensor, branch_output: torch.Tensor, products: Products
) -> torch.Tensor:
    """H = A_r^T S + b (outer) f, `[B, S, N, D]`, in the dtype that `streams + branch_output` would have."""
    dtype = torch.promote_types(streams.dtype, branch_output.dtype)
    values, output = streams.to(coefficients.dtype), without_overflow(branch_output.to(coefficients.dtype), dtype)
    mix, beta = coefficients[..., 1:-1], coefficients[..., -1:]
    return products.mixed(mix, values).addcmul_(beta, output.unsqueeze(-2)).to(dtype)


def write_backward(
    grad: torch.Tensor, coefficients: torch.Tensor, branch_output: torch.Tensor, products: Products
) -> tuple[torch.Tensor, torch.Tensor]:
    """From the gradient of H, those of b `[B, S, N]` and of f `[B, S, D]`; that of A_r^T S is the gradient of H."""
    values, output = grad.to(coefficients.dtype), without_overflow(branch_output.to(coefficients.dtype), grad.dtype)
    grad_output = products.mixed(coefficients[..., -1:], values).squeeze(-2)
    return products.dots(values, output.unsqueeze(-2)).squeeze(-1), grad_output.to(branch_output.dtype)


def read(streams: torch.Tensor, parameters: CoefficientParameters, products: Products) -> Read:
    """The branch input x = A_m^T H of streams `[B, S, N, D]`, and the coefficients."""
    values = streams.to(parameters.static_alpha.dtype)
    coefficients, predicted, deviation, mean = parameters.static(), None, None, None
    if parameters.fn is not None:
        mean = values.mean(-1) if parameters.centred else None
        centred = _centred(values, mean)
        variance = torch.linalg.vector_norm(centred, dim=-1).square_().div_(streams.shape[-1])
        deviation = variance.add_(parameters.eps).rsqrt_()
        predicted = products.dots(centred, parameters.fn).mul_(deviation.unsqueeze(-1))
        coefficients = coefficients + parameters.scale() * parameters.squash(predicted)
    branch_input = products.mixed(coefficients[..., :1], values).squeeze(-2)
    return Read(branch_input.to(streams.dtype), coefficients, predicted, deviation, mean)


def read_backward(
    streams: torch.Tensor,
    parameters: CoefficientParameters,
    result: Read,
    grad_mixed: torch.Tensor,
    grad_input: torch.Tensor,
    grad_beta: torch.Tensor | None,
    wants_fn: bool,
    products: Products,
) -> tuple[torch.Tensor, CoefficientGrads]:
    """From the gradients of A_r^T H, of x and of b, those of H and of the parameters."""
    coefficients = result.coefficients
    values, mixed, inputs = (x.to(coefficients.dtype) for x in (streams, grad_mixed, grad_input.unsqueeze(-2)))
    if grad_beta is None:
        grad_beta = values.new_zeros(values.shape[:-1])
    grad_coefficients = torch.cat(
        [products.dots(values, inputs), products.dots(values, mixed), grad_beta.unsqueeze(-1)], dim=-1
    )
    grad = products.mixed(coefficients[..., 1:-1].transpose(-1, -2), mixed).addcmul_(coefficients[..., :1], inputs)
    if parameters.fn is None:
        return grad.to(streams.dtype), coefficient_grads(parameters, result, grad_coefficients, None, None)

    grad_predicted = grad_coefficients * parameters.scale()
    if parameters.tanh:
        grad_predicted = grad_predicted * (1 - parameters.squash(result.predicted).square())
    deviation, size = result.deviation, streams.shape[-1]
    scaled = grad_predicted * deviation.unsqueeze(-1)
    by_value = -deviation * (scaled * result.predicted).sum(-1) / size
    centred = _centred(values, result.mean)
    products.add_mixed(grad, scaled, parameters.fn)
    grad.addcmul_(centred, by_value.unsqueeze(-1))
    if result.mean is not None:
        grad.sub_((scaled * parameters.fn.sum(-1)).sum(-1, keepdim=True) / size)
    grad_fn = products.over_tokens(scaled, centred) if wants_fn else None
    return grad.to(streams.dtype), coefficient_grads(parameters, result, grad_coefficients, grad_predicted, grad_fn)


def _centred(values: torch.Tensor, mean: torch.Tensor | None) -> torch.Tensor:
    """Streams without their means, before anything is summed: sums of a large mean would cancel."""
    return values if mean is None else values - mean.unsqueeze(-1)


def _mixed_by_sums(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    pairs = zip(weights.unbind(-2), values.unbind(-2), strict=True)
    return reduce(add, (weight.unsqueeze(-1) * value.unsqueeze(-2) for weight, value in pairs))


def _dots_by_sums(values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return torch.stack([(values * other.unsqueeze(-2)).sum(-1) for other in others.unbind(-2)], dim=-1)


def _add_mixed_by_sums(onto: torch.Tensor, weights: torch.Tensor, fn: torch.Tensor) -> None:
    for weight, row in zip(weights.unbind(-1), fn.unbind(0), strict=True):
        onto.addcmul_(weight.unsqueeze(-1), row)


def _over_tokens_by_sums(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.stack([(weight.unsqueeze(-1) * values).flatten(0, -2).sum(0) for weight in weights.unbind(-1)])


MATRIX_PRODUCTS = Products(
    mixed=lambda weights, values: weights.transpose(-1, -2) @ values,
    dots=lambda values, others: values @ others.transpose(-1, -2),
    add_mixed=lambda onto, weights, fn: onto.flatten(0, -2).addmm_(weights.flatten(0, -2), fn),
    over_tokens=lambda weights, values: weights.flatten(0, -2).transpose(0, 1) @ values.flatten(0, -2),
)
SUMS = Products(_mixed_by_sums, _dots_by_sums, _add_mixed_by_sums, _over_tokens_by_sums)
BY_MATRIX_PRODUCTS, BY_SUMS = steps_of(MATRIX_PRODUCTS), steps_of(SUMS)


def products_on(device: torch.device) -> Products:
    """What sums are made with on a device, so that none of them loses bits of its operands."""
    return MATRIX_PRODUCTS if uses_matrix_products(device) else SUMS


def is_exporting() -> bool:
    """Whether `torch.export` looks on.

    As `torch.compiler.is_exporting`, which for Dynamo is always true before torch 2.12.
    """
    return getattr(torch.compiler, "_is_exporting_flag", False)


def uses_matrix_products(device: torch.device) -> bool:
    """Whether small matrix products on `device` are the faster form and keep every bit of their operands.

    A compiler fuses sums into fewer passes over the streams. What is exported is read by other programs, to whom every
    operation is one.
    """
    if torch.compiler.is_compiling() and not is_exporting():
        return False
    if device.type not in EXACT_AT_HIGHEST:
        return False
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # the precision was set per backend, so it may be reduced
        return False


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """In which streams of `dtype` are computed: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)
