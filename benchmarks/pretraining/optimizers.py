"""The optimizers of runs: AdamW, with Muon for matrices where a run asks for it."""

from collections.abc import Callable

import torch
from torch import nn

from hf_hyperconn import hc_param_groups, hc_parameters

from .runs import Run

WEIGHT_DECAY, BETA1 = 0.1, 0.9
OF_ADAMW = 0.2  # the root mean square of its updates, as multiples of the rate


class Muon(torch.optim.Muon):
    """PyTorch's, with updates as large as AdamW's, in float32: in bfloat16 a CPU takes more than twice the time."""

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for parameters in _by_shape([parameter for parameter in group["params"] if parameter.grad is not None]):
                gradients = [parameter.grad for parameter in parameters]
                averages = [
                    self.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))
                    for parameter in parameters
                ]
                torch._foreach_lerp_(averages, gradients, 1 - group["momentum"])
                updates = torch.stack(torch._foreach_lerp(gradients, averages, group["momentum"]))
                updates = orthogonal(updates, group["ns_coefficients"], group["ns_steps"], group["eps"])
                torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
                scale = OF_ADAMW * max(parameters[0].shape) ** 0.5 * group["lr"]
                torch._foreach_sub_(parameters, updates.mul_(scale).unbind())


def _by_shape(parameters: list[nn.Parameter]) -> list[list[nn.Parameter]]:
    shapes = {}
    for parameter in parameters:
        shapes.setdefault(parameter.shape, []).append(parameter)
    return list(shapes.values())


def orthogonal(
    matrices: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Newton–Schulz: matrices `[K, M, N]` with all their singular values near one."""
    a, b, c = coefficients
    tall = matrices.shape[1] > matrices.shape[2]
    wide = matrices.mT if tall else matrices
    wide = wide / wide.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        square = wide @ wide.mT
        wide = torch.baddbmm(wide, torch.baddbmm(square, square, square, beta=b, alpha=c), wide, beta=a)
    return wide.mT if tall else wide


class Together(torch.optim.Optimizer):
    """Optimizers that a schedule and a training loop see as one."""

    def __init__(self, *parts: torch.optim.Optimizer) -> None:
        self.parts = parts

    @property
    def param_groups(self) -> list[dict]:
        return [group for part in self.parts for group in part.param_groups]

    def step(self, closure: Callable[[], float] | None = None) -> None:
        for part in self.parts:
            part.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for part in self.parts:
            part.zero_grad(set_to_none)

    def state_dict(self) -> dict:
        return {"parts": [part.state_dict() for part in self.parts]}

    def load_state_dict(self, state_dict: dict) -> None:
        for part, state in zip(self.parts, state_dict["parts"], strict=True):
            part.load_state_dict(state)


def optimizer_of(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    """AdamW, with a learning rate for the connections; with Muon beside it if the run asks for that."""
    hc_lr = run.hc_lr * run.learning_rate if hasattr(model.config, "hc_mult") else None
    groups = hc_param_groups(model, run.learning_rate, WEIGHT_DECAY, hc_lr=hc_lr)
    matrices = matrices_of(model) if run.muon else []
    taken = set(map(id, matrices))
    rest = [
        {**group, "params": [parameter for parameter in group["params"] if id(parameter) not in taken]}
        for group in groups
    ]
    adam = torch.optim.AdamW(rest, betas=(BETA1, run.beta2), fused=True)
    if not matrices:
        return adam
    return Together(adam, Muon(matrices, lr=run.learning_rate, weight_decay=WEIGHT_DECAY))


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    """Return the weights of projections inside of layers, without those of connections."""
    of_connections = set(hc_parameters(model))
    return [
        parameter
        for name, parameter in model.model.layers.named_parameters(prefix="model.layers")
        if parameter.ndim == 2 and name not in of_connections
    ]
