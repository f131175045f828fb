"""Two consecutive dynamic or static connections, and what a step of theirs gives."""

import torch
from torch import nn

from hf_hyperconn.models.hyper_connections import HyperConnection
from tests.triton.common import DEVICE, seed


def connections(n: int, size: int, norm: str, tanh: bool) -> list[HyperConnection]:
    """Two consecutive connections with random parameters; what they predict is of order one."""
    modules = []
    for k in range(2):
        torch.manual_seed(k)
        kinds = {
            "rms": lambda: nn.RMSNorm(size, eps=1e-6),
            "layer": lambda: nn.LayerNorm(size),
            "static": lambda: None,
        }
        module = HyperConnection(size, n, k, norm=kinds[norm](), tanh=tanh)
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                spread = size**-0.5 if name.endswith("fn") else 0.3
                parameter.add_(spread * torch.randn_like(parameter))
        modules.append(module.to(DEVICE))
    return modules


def results(modules: list[HyperConnection], streams: torch.Tensor, dtype: torch.dtype) -> list[torch.Tensor]:
    """Read, write and read, write: what they give, and every gradient for given gradients of that."""
    first, second = modules
    streams = streams.to(dtype).requires_grad_()
    outputs = [
        (torch.randn(*streams.shape[:2], streams.shape[-1], generator=seed(k))).to(DEVICE, dtype) for k in (1, 2)
    ]
    outputs = [output.requires_grad_() for output in outputs]
    x0, carry = first.width_connection(streams)
    x1, carry = second(carry.write(outputs[0]))
    after = carry.write(outputs[1]).written()
    made = [x0, x1, after]
    grads = [torch.randn(y.shape, generator=seed(3 + k)).to(DEVICE, dtype) for k, y in enumerate(made)]
    parameters = [p for module in modules for p in module.parameters()]
    found = torch.autograd.grad(made, [streams, *outputs, *parameters], grads)
    return [*(y.detach() for y in made), *found]
