# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Steps (see `hc_step.py`): their inputs and outputs, and how plain torch computes them.

Matrix products are few operations, the faster form in eager mode. A setting of the process can make them lossy; sums
written out never are, and a compiler fuses them. Either way sums over the streams are float32 (float64 for float64
streams), and streams are rounded once, when they are written. At the end is a step that autograd differentiates, for
derivatives of the gradients. Coefficients of one token are `[N, N+2]`: the columns of A_m, A_r and b; SHC has the same
for all tokens, without token dimensions.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .computing import MATRIX_PRODUCTS, SUMS, Products, gradients
from .connection import clamp_infinities


class CoefficientParameters(NamedTuple):
    """The tensors and settings that a width connection computes its coefficients with, in the compute dtype.

    static_alpha: `[N, N+1]`. static_beta: `[N]`.
    fn: `[N+2, D]`, the norm's weight folded in; None for static coefficients, as is everything below.
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
        """Return the static coefficients, `[N, N+2]`."""
        return torch.cat([self.static_alpha, self.static_beta.unsqueeze(-1)], dim=-1)

    def scale(self) -> torch.Tensor:
        """Return the scale of each column of dynamic coefficients, `[N+2]`."""
        return torch.cat([self.alpha_scale.expand(self.static_alpha.shape[-1]), self.beta_scale])

    def squash(self, predicted: torch.Tensor) -> torch.Tensor:
        """Return the predicted term of the coefficients before it is scaled."""
        logits = predicted if self.offset is None else predicted + self.offset
        return logits.tanh() if self.tanh else logits


class ConnectionParameters(NamedTuple):
    """The tensors of a connection, in the compute dtype, and the settings for its coefficients.

    static_alpha: `[N, N+1]`. static_beta: `[N]`.
    alpha_fn, beta_fn: `[D, N+1]` and `[D]`; None for static coefficients, as is everything below.
    weight, bias: of the norm, `[D]`, each or None.
    alpha_scale, beta_scale: `[1]`.
    eps, centred, tanh: as of `CoefficientParameters`.
    """

    static_alpha: torch.Tensor
    static_beta: torch.Tensor
    alpha_fn: torch.Tensor | None = None
    beta_fn: torch.Tensor | None = None
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    alpha_scale: torch.Tensor | None = None
    beta_scale: torch.Tensor | None = None
    eps: float = 0.0
    centred: bool = False
    tanh: bool = True

    def to(self, dtype: torch.dtype) -> "ConnectionParameters":
        """Return the same with tensors of a dtype."""
        tensors: Any = (x if x is None or x.dtype == dtype else x.to(dtype) for x in self[:8])
        return ConnectionParameters._make((*tensors, *self[8:]))

    def folded(self) -> CoefficientParameters:
        """Return the same with one `fn` that has the norm's parameters in it."""
        if self.alpha_fn is None:
            return CoefficientParameters(self.static_alpha, self.static_beta)
        fn = torch.cat([self.alpha_fn.transpose(0, 1), self.beta_fn.unsqueeze(0)])
        return CoefficientParameters(
            self.static_alpha,
            self.static_beta,
            fn if self.weight is None else fn * self.weight,
            None if self.bias is None else (fn * self.bias).sum(-1),
            *self[6:],
        )


class Read(NamedTuple):
    """The results of reading streams.

    branch_input: `[B, S, D]`, in the dtype of the streams.
    coefficients: `[B, S, N, N+2]`, or `[N, N+2]` when static.
    predicted: norm(H) @ fn, without offset, `[B, S, N, N+2]`; or None.
    deviation, mean: the norm's 1 / sqrt(...) and its mean, `[B, S, N]`; or None.
    """

    branch_input: torch.Tensor
    coefficients: torch.Tensor
    predicted: torch.Tensor | None = None
    deviation: torch.Tensor | None = None
    mean: torch.Tensor | None = None


class StepGrads(NamedTuple):
    """The gradients of a step.

    streams: of A_r'^T S when the step wrote, of S when it only read, `[B, S, N, D]`.
    parameters: in the places of the tensors that they belong to; None when it did not read.
    written_beta, branch_output: of b' `[B, S, N]` and f `[B, S, D]`; None when it did not write.
    """

    streams: torch.Tensor
    parameters: CoefficientParameters | None
    written_beta: torch.Tensor | None
    branch_output: torch.Tensor | None


class StepFunctions(NamedTuple):
    """An implementation of steps.

    step_forward: H and the result of reading it, from S, A' and f (None when nothing is written) and the parameters
        of the coefficients (None when nothing is read).
    step_backward: `StepGrads`, from the same, the result of reading, and the gradients of the step's outputs. These
        are the streams handed on, x and b (None for static coefficients). S is needed only when the step reads. The
        gradient of `fn` is left out when it is not wanted. The gradient of static b is always left out.
    """

    step_forward: Callable
    step_backward: Callable


def step_functions(products: Products) -> StepFunctions:
    """Return the functions of steps that make their sums by `products`."""

    def step_forward(
        streams: torch.Tensor,
        coefficients: torch.Tensor | None,
        branch_output: torch.Tensor | None,
        parameters: CoefficientParameters | None,
    ) -> tuple[torch.Tensor, Read | None]:
        if coefficients is not None:
            streams = mix_and_write(streams, coefficients, branch_output, products)
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
                streams = mix_and_write(streams, coefficients, branch_output, products)
            grads = grad_streams, grad_input, grad_beta
            grad_streams, of_parameters = read_backward(streams, parameters, result, *grads, wants_fn, products)
        if coefficients is not None:
            of_beta, of_output = write_backward(grad_streams, coefficients, branch_output, products)
        return StepGrads(grad_streams, of_parameters, of_beta, of_output)

    return StepFunctions(step_forward, step_backward)


def coefficient_grads(
    parameters: CoefficientParameters,
    result: Read,
    grad_coefficients: torch.Tensor,
    grad_predicted: torch.Tensor | None,
    grad_fn: torch.Tensor | None,
) -> CoefficientParameters:
    """Return the gradients of parameters, in their places.

    grad_coefficients, grad_predicted: the gradients of each token's coefficients and prediction, `[B, S, N, N+2]`.
    grad_fn: the gradient of `fn`, or None.
    """
    static = grad_coefficients.flatten(0, -3).sum(0)
    of_static = static[:, :-1], static[:, -1]
    if parameters.fn is None:
        return CoefficientParameters(*of_static)
    of_scale = (grad_coefficients * parameters.squash(result.predicted)).flatten(0, -2).sum(0)
    of_offset = None if parameters.offset is None else grad_predicted.flatten(0, -2).sum(0)
    of_scales = of_scale[:-1].sum(0, keepdim=True), of_scale[-1:]
    return CoefficientParameters(*of_static, grad_fn, of_offset, *of_scales)


def mix_and_write(
    streams: torch.Tensor, coefficients: torch.Tensor, branch_output: torch.Tensor, products: Products
) -> torch.Tensor:
    """Return H = A_r^T S + b (outer) f, `[B, S, N, D]`, in the dtype that `streams + branch_output` would have."""
    dtype = torch.promote_types(streams.dtype, branch_output.dtype)
    values, output = streams.to(coefficients.dtype), clamp_infinities(branch_output.to(coefficients.dtype), dtype)
    mix, beta = coefficients[..., 1:-1], coefficients[..., -1:]
    return products.mixed(mix, values).addcmul_(beta, output.unsqueeze(-2)).to(dtype)


def write_backward(
    grad: torch.Tensor, coefficients: torch.Tensor, branch_output: torch.Tensor, products: Products
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gradients of b `[B, S, N]` and f `[B, S, D]` from the gradient of H, which is also A_r^T S's."""
    values, output = grad.to(coefficients.dtype), clamp_infinities(branch_output.to(coefficients.dtype), grad.dtype)
    grad_output = products.mixed(coefficients[..., -1:], values).squeeze(-2)
    return products.dots(values, output.unsqueeze(-2)).squeeze(-1), grad_output.to(branch_output.dtype)


def read(streams: torch.Tensor, parameters: CoefficientParameters, products: Products) -> Read:
    """Return the branch input x = A_m^T H of streams `[B, S, N, D]`, and the coefficients."""
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
) -> tuple[torch.Tensor, CoefficientParameters]:
    """Return the gradients of H and of the parameters from the gradients of A_r^T H, x and b."""
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
    """Return streams without their means, before anything is summed: sums of a large mean would cancel."""
    return values if mean is None else values - mean.unsqueeze(-1)


BY_MATRIX_PRODUCTS, BY_SUMS = step_functions(MATRIX_PRODUCTS), step_functions(SUMS)


def gradients_by_autograd(
    settings: tuple | None, tensors: tuple[torch.Tensor | None, ...], grads: tuple[torch.Tensor | None, ...]
) -> list[torch.Tensor | None]:
    """Return the gradients of a step's tensors with a graph of their own.

    settings: eps, centred and tanh of the parameters; None when the step only writes.
    tensors: S, A', f and the six tensors of the parameters, each of them or None.
    grads: the gradients of the streams handed on, of x and of the coefficients.
    """
    of_streams, of_input, of_coefficients = grads
    if settings is None:
        of_write = gradients(lambda *write: (addition(*write),), tensors[1:3], (of_streams,))
        return [of_streams, *of_write, *(None,) * 6]

    def step(streams, coefficients, branch_output, *parameters):
        return write_and_read(streams, coefficients, branch_output, CoefficientParameters(*parameters, *settings))

    return gradients(step, tensors, (of_streams, of_input, of_coefficients[..., -1]))


def write_and_read(
    streams: torch.Tensor,
    coefficients: torch.Tensor | None,
    branch_output: torch.Tensor | None,
    parameters: CoefficientParameters,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return A_r^T H, x and b of a step that reads.

    When something is written, the gradient of `streams` is the gradient of A_r'^T S.
    """
    if coefficients is not None:
        dtype = torch.promote_types(streams.dtype, branch_output.dtype)
        streams = (_Mixed.apply(streams, coefficients) + addition(coefficients, branch_output)).to(dtype)
    values, used = streams.to(parameters.static_alpha.dtype), parameters.static()
    if parameters.fn is not None:
        centred = values - values.mean(-1, keepdim=True) if parameters.centred else values
        normed = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + parameters.eps)
        used = used + parameters.scale() * parameters.squash(normed @ parameters.fn.transpose(0, 1))
    return _mixed(used, values), _weighted_sum(used[..., 0], values).to(streams.dtype), used[..., -1]


def addition(coefficients: torch.Tensor, branch_output: torch.Tensor) -> torch.Tensor:
    """Return b (outer) f, `[B, S, N, D]`, in the dtype of the coefficients."""
    output = clamp_infinities(branch_output.to(coefficients.dtype), branch_output.dtype)
    return coefficients[..., -1:] * output.unsqueeze(-2)


def _mixed(coefficients: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return A_r^T H, `[B, S, N, D]`."""
    return torch.stack([_weighted_sum(column, values) for column in coefficients[..., 1:-1].unbind(-1)], dim=-2)


def _weighted_sum(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return the sum of streams `[B, S, N, D]` with weights `[B, S, N]` or `[N]`: `[B, S, D]`."""
    return (weights.unsqueeze(-1) * values).sum(-2)


class _Mixed(torch.autograd.Function):
    """A_r^T H as a variable of its own, because a step's gradient of H is the gradient of A_r^T H."""

    generate_vmap_rule = True

    @staticmethod
    def forward(streams, coefficients):
        return _mixed(coefficients, streams.to(coefficients.dtype))

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        return grad, None
