"""Muon for the matrices inside of layers, another optimizer for the rest, and both as one.

Muon makes the update of a matrix orthogonal, which is meant for linear maps of features. A connection's matrices are
coefficients, so they never belong to Muon. Embeddings, heads, norms and biases do not, either.
"""

from collections.abc import Callable, Container, Iterator
from itertools import islice
from typing import Any

import torch
from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from ..errors import HyperConnError
from ..models.sub_layers import is_of_connection


class CombinedOptimizer(torch.optim.Optimizer):
    """Optimizers that a Trainer, a schedule and a checkpoint see as one.

    parts: optimizers of different parameters. Later groups join the last one.
    """

    def __init__(self, *parts: torch.optim.Optimizer):
        self.parts = parts
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.__setstate__({})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        groups = iter(self.param_groups)
        for part in self.parts:
            own = list(islice(groups, len(part.param_groups)))
            part.__setstate__({"state": self.state, "param_groups": own})

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        if not any(group is param_group for part in self.parts for group in part.param_groups):
            self.parts[-1].add_param_group(param_group)
        super().add_param_group(param_group)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part in self.parts:
            part.step()
        return loss


def hidden_matrices(model: nn.Module, decayed: Container[str]) -> dict[str, nn.Parameter]:
    """Return the matrices that Muon may orthogonalize, by their names: weights `[out, in]` inside of layers.

    A layer is a module with connections, or one that Transformers can checkpoint. Routers of mixtures are among them,
    as in Moonlight (2502.16982). Experts in one tensor `[experts, out, in]` are not, as torch's Muon takes matrices.

    decayed: names of the parameters with weight decay, which excludes norms and biases.

    Raises `HyperConnError` when none of the matrices is trained.
    """
    weights = {f"{path}.weight" for path in _modules_of_layers(model)}
    matrices = {
        name: parameter
        for name, parameter in model.named_parameters()
        if name in weights and name in decayed and parameter.dim() == 2 and min(parameter.shape) > 1
    }
    if not any(matrix.requires_grad for matrix in matrices.values()):
        raise HyperConnError(
            f"{type(model).__name__} has no trained matrices inside of layers for Muon. Leave muon out."
        )
    return matrices


def give_to_muon(optimizer: torch.optim.Optimizer, matrices: dict[str, nn.Parameter]) -> CombinedOptimizer:
    """Move matrices from a new optimizer to torch's Muon, with their learning rates and weight decays.

    Muon's updates are as large as AdamW's (Section 2.2 of 2502.16982), so the same rate serves both.
    """
    moved, ids = [], {id(matrix) for matrix in matrices.values()}
    for group in optimizer.param_groups:
        taken = [parameter for parameter in group["params"] if id(parameter) in ids]
        group["params"] = [parameter for parameter in group["params"] if id(parameter) not in ids]
        if taken:
            moved.append({"params": taken, "lr": group["lr"], "weight_decay": group["weight_decay"]})
    return CombinedOptimizer(torch.optim.Muon(moved, adjust_lr_fn="match_rms_adamw"), optimizer)


def refuse_orthogonalized(model: nn.Module, optimizer: Any) -> None:
    """Raise `HyperConnError` when Muon trains connections: torch's, or an optimizer with `use_muon` in its groups."""
    orthogonalized = {
        id(parameter)
        for group in getattr(optimizer, "param_groups", ())
        if group.get("use_muon", "ns_steps" in group)
        for parameter in group["params"]
    }
    for name, parameter in model.named_parameters():
        if is_of_connection(name) and id(parameter) in orthogonalized:
            raise HyperConnError(
                f"Muon has {name}, whose entries are coefficients: an orthogonal update would replace them. Make its "
                f"groups by hc_param_groups(model, ..., muon=True), or give HCTrainer muon=True."
            )


def _modules_of_layers(model: nn.Module) -> Iterator[str]:
    """Iterate over the paths of modules in layers, without connections and embeddings."""
    for path, layer in model.named_modules():
        if isinstance(layer, GradientCheckpointingLayer) or any(map(is_of_connection, dict(layer.named_children()))):
            for place, module in layer.named_modules(prefix=path):
                if not is_of_connection(place) and not isinstance(module, nn.Embedding):
                    yield place
