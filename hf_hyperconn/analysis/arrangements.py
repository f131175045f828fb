"""Known architectures as static matrices of hyper-connections (HC paper, Sections 3.1, 3.2, Appendices G and H).

`arrange` sets the matrices of a model, whose sub-layers T_k then need not follow each other.
"""

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import HyperConnError
from ..models.hyper_connections import HyperConnection
from .observation import connections_of, stacks_of, with_layers


def sequential(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and b of sub-layers one after the other, for any n: x_{k+1} = x_k + T_k(x_k) in every stream.

    With n = 1, this is Eq. 15's Pre-Norm.
    """
    identity = torch.eye(n)
    return torch.cat([identity[:, :1], identity], dim=1), torch.ones(n)


def parallel(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and b of n sub-layers side by side: x_{g+1} = sum of x_g + T_k(x_g) over the k of group g.

    The readout is "sum". Each sub-layer has a residual of its own, so a group multiplies x by n. The norm in T undoes
    that. After the first sub-layer of a group, Eq. 55 of Appendix H.2 prints e_i. Eq. 19 and the proof use e_{i+1},
    as does this function.
    """
    identity, position = torch.eye(n), k % n
    if position == 0:
        return torch.ones(n, n + 1), identity[0]
    return torch.cat([identity[:, position : position + 1], identity], dim=1), identity[position]


def two_hop(n: int, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and b of two streams where the MLP adds to the input of attention: y = x + MLP(x + attention(x)).

    Raises `HyperConnError` for another number of streams.
    """
    if n != 2:
        raise HyperConnError(f"hc_mult must be 2 for the two-hop residual (got {n}). Arrange a model with 2 streams.")
    from_the_first = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    read = torch.eye(2)[:, k % 2 : k % 2 + 1]
    return torch.cat([read, from_the_first], dim=1), torch.tensor([[0.0, 1.0], [1.0, 1.0]])[k % 2]


ARRANGEMENTS: dict[str, Callable[[int, int], tuple[torch.Tensor, torch.Tensor]]] = {
    "sequential": sequential,
    "parallel": parallel,
    "two_hop": two_hop,
}


@torch.no_grad()
def arrange(model: PreTrainedModel, name: str) -> None:
    """Set the static matrices of a model with static or dynamic hyper-connections to an architecture.

    name: "sequential", "parallel" or "two_hop". The dynamic part is left as it is.

    Raises `HyperConnError` for another name, a model without such connections or with the history start, or a number
    of streams that the architecture does not accept.
    """
    if name not in ARRANGEMENTS:
        raise HyperConnError(f"name must be one of {', '.join(map(repr, ARRANGEMENTS))} (got {name!r}). Give one.")
    stacks: list[str | None] = [*stacks_of(model)] or [None]
    by_stack = [[*connections_of(with_layers(model, stack)).values()] for stack in stacks]
    connections: list[Any] = sum(by_stack, [])
    if not connections or any(type(module).__name__ != HyperConnection.__name__ for module in connections):
        raise HyperConnError(
            f"{type(model).__name__} has no static or dynamic hyper-connections ('shc' or 'dhc'). Give one that has."
        )
    if any(connection.written is not None for connection in connections):
        raise HyperConnError("the readout of the history start reads one stream alone. Arrange a model without it.")
    for in_stack in by_stack:
        for k, connection in enumerate(in_stack):
            alpha, beta = ARRANGEMENTS[name](connection.hc_mult, k)
            connection.static_alpha.copy_(alpha)
            connection.static_beta.copy_(beta)


def post_norm(x: torch.Tensor, branch_output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and b with which one stream computes a Post-Norm residual, Norm(x + T(x)), of Eq. 16.

    x, branch_output: `[..., D]`, each of mean zero over D.

    Returns A `[..., 1, 2]` and b `[..., 1]`. They depend on the branch output, so they can't be parameters.
    """
    variance = x.var(-1, correction=0) + branch_output.var(-1, correction=0) + 2 * (x * branch_output).mean(-1)
    beta = torch.rsqrt(variance).unsqueeze(-1)
    return torch.stack([torch.ones_like(beta), beta], dim=-1), beta
