"""The optimizers of runs: AdamW, with Muon for matrices where a run asks for it."""

from collections.abc import Callable

import torch
from torch import nn

from hf_hyperconn import hc_param_groups, hc_parameters

from .runs import Run

WEIGHT_DECAY, BETA1 = 0.1, 0.9


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
    groups = hc_param_groups(model, run.learning_rate, WEIGHT_DECAY, hc_lr=run.hc_lr * run.learning_rate)
    matrices = matrices_of(model) if run.muon else []
    taken = set(map(id, matrices))
    rest = [{**group, "params": [each for each in group["params"] if id(each) not in taken]} for group in groups]
    adam = torch.optim.AdamW(rest, betas=(BETA1, run.beta2), fused=True)
    if not matrices:
        return adam
    muon = torch.optim.Muon(matrices, lr=run.learning_rate, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw")
    return Together(adam, muon)


def matrices_of(model: nn.Module) -> list[nn.Parameter]:
    """The weights of projections inside of layers, without those of connections."""
    of_connections = set(hc_parameters(model))
    return [
        parameter
        for name, parameter in model.model.layers.named_parameters(prefix="model.layers")
        if parameter.ndim == 2 and name not in of_connections
    ]
