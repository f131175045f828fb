# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Norms by their formula, whatever their class, so that a step can compute them by itself.

A norm is run once, on a few vectors and with known parameters. Its name does not matter, because families, engines and
kernels have classes of their own for the same function. Where a norm's kernels can't run, as on a CPU, its attributes
tell the formula, for a few libraries. Any other norm is unknown, and called.
"""

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import nn

USUAL_EPS = (1e-5, 1e-6, 1e-8)  # of norms that don't keep theirs in an attribute
SCALES = (1.0, 30.0, 1e-3, 1e-5)  # of the vectors; in small ones eps is seen
RTOL, ATOL = 1e-5, 1e-6


class NormForm(NamedTuple):
    """A norm of the last dimension as weight * (x - mean) / sqrt(variance + eps) + bias, without its parameters.

    norm_class: the class of the norm.
    eps: see the formula.
    centred: whether the norm subtracts the mean; else the mean square is the variance.
    added: number added to the parameter `weight`, 1 for Gemma's norms; None without such a parameter.
    has_bias: whether there is a parameter `bias`.
    """

    norm_class: type[nn.Module]
    eps: float
    centred: bool
    added: float | None
    has_bias: bool

    def parameters_of(self, norm: nn.Module) -> tuple[torch.Tensor | None, torch.Tensor | None] | None:
        """Return the current weight and bias `[D]` of the formula, each or None; None if the norm must be called.

        FSDP2 changes the class of a norm that is a unit of its own, and whose weight exists only while it runs.
        """
        if type(norm) is not self.norm_class:
            return None
        weight: Any = None if self.added is None else norm.weight
        bias: Any = norm.bias if self.has_bias else None
        if self.added:
            weight = self.added + weight
        return weight, bias


def form_of(norm: nn.Module, size: int) -> NormForm | None:
    """Return the form of a norm of `size` channels; None for another or an unknown function.

    Its tensors may be on any device, the meta device included.
    """
    tensors = dict(norm.named_parameters()) | dict(norm.named_buffers())
    if not tensors.keys() <= {"weight", "bias"} or any(tensor.shape != (size,) for tensor in tensors.values()):
        return None
    try:
        return _observed_form(norm, size, tensors)
    except Exception:  # whatever somebody else's norm raises where its kernels can't run
        return _declared_form(norm, tensors)


def _declared_form(norm: nn.Module, tensors: dict[str, torch.Tensor]) -> NormForm | None:
    """Return the form of a kernel library's RMSNorm, by its attributes."""
    attributes, name = vars(norm), type(norm).__name__
    package = type(norm).__module__.partition(".")[0]
    eps, added = attributes.get("variance_epsilon"), None
    if package == "liger_kernel" and name.startswith("LigerRMSNorm"):
        added = attributes.get("offset")
    elif package in ("vllm", "sglang") and name == "RMSNorm" and attributes.get("variance_size_override") is None:
        added = 0.0
    if tensors.keys() != {"weight"} or not isinstance(eps, float) or not isinstance(added, float):
        return None
    return NormForm(type(norm), eps, centred=False, added=added, has_bias=False)


def _observed_form(norm: nn.Module, size: int, tensors: dict[str, torch.Tensor]) -> NormForm | None:
    from torch._subclasses.fake_tensor import unset_fake_temporarily  # torch's own: a folder must load without it

    with unset_fake_temporarily(), torch.device("cpu"), torch.no_grad(), torch.autocast("cpu", enabled=False):
        channels = torch.arange(1, size + 1, dtype=torch.float32)
        vectors = torch.stack([scale * (torch.sin(channels * (i + 1)) + 0.5) for i, scale in enumerate(SCALES)])
        known = {"weight": 1 + torch.cos(channels) / 2, "bias": torch.sin(2 * channels)}
        replaced = {id(tensor): nn.Parameter(known[name].clone()) for name, tensor in tensors.items()}
        twin = deepcopy(norm, replaced)
        normed = twin(vectors.clone())
        if not isinstance(normed, torch.Tensor) or normed.shape != vectors.shape:
            return None
        for form in _forms(norm, tensors):
            parameters = form.parameters_of(twin)
            if parameters and torch.allclose(_by_formula(vectors, form, *parameters), normed, rtol=RTOL, atol=ATOL):
                return form
    return None


def _forms(norm: nn.Module, parameters: dict[str, torch.Tensor]) -> Iterator[NormForm]:
    own = [value for value in vars(norm).values() if isinstance(value, float) and 0 < value < 1]
    added = (0.0, 1.0) if "weight" in parameters else (None,)
    for eps in dict.fromkeys((*own, *USUAL_EPS)):
        for centred in (False, True):
            yield from (NormForm(type(norm), eps, centred, offset, "bias" in parameters) for offset in added)


def _by_formula(
    x: torch.Tensor, form: NormForm, weight: torch.Tensor | None, bias: torch.Tensor | None
) -> torch.Tensor:
    values = x - x.mean(-1, keepdim=True) if form.centred else x
    values = values * torch.rsqrt(values.square().mean(-1, keepdim=True) + form.eps)
    values = values if weight is None else weight * values
    return values if bias is None else values + bias
