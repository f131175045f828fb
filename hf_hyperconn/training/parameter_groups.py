"""Parameters in training: weight decay, learning rates, freezing.

Weight decay pulls a parameter to zero. For the static part of a connection zero means no residual connection at all,
so it does not decay. Scales don't, either. Parameters that predict the dynamic part decay (HC paper, Section 4).
"""

from collections.abc import Iterable
from typing import Any

from torch import nn
from transformers.utils import logging

from ..errors import HyperConnError
from ..models.sub_layers import is_of_connection
from ..wrappers import modules_in_use
from .muon import hidden_matrices

logger = logging.get_logger(__name__)

WIDTH = ("static_alpha", "dynamic_alpha_fn", "dynamic_alpha_scale")
DEPTH = ("static_beta", "dynamic_beta_fn", "dynamic_beta_scale")


def hc_param_groups(
    model: nn.Module, lr: float, weight_decay: float, hc_lr: float | None = None, muon: bool = False
) -> list[dict[str, Any]]:
    """Return parameter groups for a `torch.optim` optimizer, by weight decay and with connections apart.

    Frozen parameters are in no group. Groups without parameters are left out.

    model: a hyper-connection model, also inside a wrapper such as PEFT's.
    lr, weight_decay: of the base; norms and biases do not decay, as in Transformers' Trainer.
    hc_lr: learning rate of the connections; None for `lr`.
    muon: whether to set `use_muon` in each group: True for matrices for Muon, False for the rest for AdamW.

    Raises `HyperConnError` for `hc_lr` without hyper-connections, and for `muon` without matrices in layers.
    """
    from transformers import Trainer  # takes seconds, with all the packages that it supports

    check_connections(model, hc_lr)
    untrained = Trainer.__new__(Trainer)  # its rule reads nothing but the model
    decayed = set(decayed_names(model, untrained.get_decay_parameter_names(model)))
    matrices = hidden_matrices(model, decayed) if muon else {}
    groups: dict[tuple[bool, bool, bool], list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            groups.setdefault((name in matrices, is_of_connection(name), name in decayed), []).append(parameter)
    return [
        {
            "params": parameters,
            "lr": hc_lr if of_connection and hc_lr is not None else lr,
            "weight_decay": weight_decay if decays else 0.0,
            **({"use_muon": is_matrix} if muon else {}),
        }
        for (is_matrix, of_connection, decays), parameters in sorted(
            groups.items(), key=lambda group: group[0], reverse=True
        )
    ]


def decayed_names(model: nn.Module, usual: Iterable[str]) -> list[str]:
    """Return the names of the parameters with weight decay.

    usual: a Trainer's names, which are right outside of connections.
    """
    decays = dict.fromkeys(usual, True)
    for path, module in model.named_modules():
        if hasattr(module, "decayed"):
            for name, _ in module.named_parameters(path, recurse=False):
                decays[name] = name.rpartition(".")[2] in module.decayed
    return [name for name, applies in decays.items() if applies]


def freeze_base(model: nn.Module) -> None:
    """Leave only the hyper-connections trainable; in PEFT's `modules_to_save`, only the active adapter's copies.

    Raises `HyperConnError` for a model without hyper-connections.
    """
    parameters = dict(model.named_parameters())
    if not any(map(is_of_connection, parameters)):
        raise _no_connections(model)
    used = {id(parameter) for _, module in modules_in_use(model) for parameter in module.parameters(recurse=False)}
    for name, parameter in parameters.items():
        parameter.requires_grad_(is_of_connection(name) and id(parameter) in used)


def freeze_hc(model: nn.Module, *, width: bool = True, depth: bool = True) -> None:
    """Freeze hyper-connections, whole or in part; other parameters stay unchanged.

    width: the width connections: reads and mixes, static and dynamic ("WC" in the paper's Table 3).
    depth: the depth connections: writes, static and dynamic ("B").

    Raises `HyperConnError` for a model without hyper-connections, and for one part of connections whose parts share
    parameters (mHC, iHC).
    """
    parameters = [(name, parameter) for name, parameter in model.named_parameters() if is_of_connection(name)]
    if not parameters:
        raise _no_connections(model)
    if width != depth and not any(name.endswith(WIDTH) for name, _ in parameters):
        raise HyperConnError(
            "the connections of this model have parameters that width and depth share. Freeze both or none."
        )
    for name, parameter in parameters:
        if width if name.endswith(WIDTH) else depth if name.endswith(DEPTH) else width and depth:
            parameter.requires_grad_(False)


def check_connections(model: nn.Module, hc_lr: float | None) -> None:
    """Warn of a model without hyper-connections, such as a base to compare with; refuse it with `hc_lr`."""
    # some have no parameters, as Keel's with a norm that has none
    if any(is_of_connection(path) for path, _ in model.named_modules()):
        return
    if hc_lr is not None:
        raise _no_connections(model)
    logger.warning(f"{_no_connections(model)} It is trained as the base that it is.")


def _no_connections(model: nn.Module) -> HyperConnError:
    return HyperConnError(f"{type(model).__name__} has no hyper-connections. Convert it first (`convert_model`).")
