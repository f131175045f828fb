"""One sub-layer as a function of its streams and of the parameters of its connection."""

from collections.abc import Callable

import torch
from torch import nn


class Norm(nn.Module):
    """RMSNorm in the dtype of its input, so that float64 stays float64."""

    def __init__(self, size: int):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(size) + 0.5)

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.weight.to(x.dtype)


def randomized(module: nn.Module, spread: float = 1.0) -> nn.Module:
    """The module, with noise in every parameter."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(spread * torch.randn_like(parameter))
    return module


def branch(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(x) + 0.5 * x


def written(
    module: nn.Module, streams: torch.Tensor, *values: torch.Tensor, branch: Callable = branch
) -> torch.Tensor:
    """The streams after a sub-layer.

    values: the parameters to use, in their order, or none for those of the module.
    """
    names = [name for name, _ in module.named_parameters()]
    parameters = dict(zip(names, values, strict=True)) if values else {}
    branch_input, carry = torch.func.functional_call(module, parameters, (module.take(streams),))
    return carry.write(branch(branch_input)).written()


def check_gradients(module: nn.Module, streams: torch.Tensor) -> None:
    """Compare the gradients of streams and parameters with finite differences; all are float64."""

    def function(*values):
        return written(module, *values)

    assert torch.autograd.gradcheck(function, (streams.requires_grad_(), *module.parameters()))
