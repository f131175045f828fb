"""The optimizers of runs: AdamW, with Muon for matrices where a run asks for it."""

from collections.abc import Callable

import torch
from torch import nn

from hf_hyperconn import hc_param_groups
from hf_hyperconn.training.muon import CombinedOptimizer

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


def optimizer_of(model: nn.Module, run: Run) -> torch.optim.Optimizer:
    """AdamW, with a learning rate for the connections; with Muon beside it if the run asks for that."""
    hc_lr = run.hc_lr * run.learning_rate if hasattr(model.config, "hc_mult") else None
    groups = hc_param_groups(model, run.learning_rate, WEIGHT_DECAY, hc_lr=hc_lr, muon=run.muon)
    of_muon = [group for group in groups if group.get("use_muon")]
    rest = [group for group in groups if not group.get("use_muon")]
    adam = torch.optim.AdamW(rest, betas=(BETA1, run.beta2), fused=True)
    return CombinedOptimizer(Muon(of_muon), adam) if of_muon else adam
