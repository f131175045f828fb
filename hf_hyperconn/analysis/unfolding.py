"""Unfolded connection matrices (HC paper, Section 4.5 and Eq. 27): the input of each sub-layer, by its writer.

Branch outputs are written to the streams, and mixed from sub-layer to sub-layer. So the input of sub-layer k is a
weighted sum of the embedding and the outputs of all earlier sub-layers. The weights are row k of C^(0):

    h_0^k = sum over j of C^(0)[k, j] T^j

with column 0 for the embedding and column j for sub-layer j - 1, counted from zero. The last row is the model's
output. C^(i) has the weights in stream i, once mixed, instead. Pre-Norm's matrix is the lower triangle of ones.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import PreTrainedModel

from ..errors import HyperConnError
from ..wrappers import config_of, connection_config, modules_in_use
from .observation import Observation, attention_of, connections_of, with_layers, with_parameters, without_reads
from .statistics import Moments


@dataclass(frozen=True)
class ConnectionMatrices:
    """C^(0) and C^(i) of a model with K sub-layers and N streams, means over tokens.

    inputs: C^(0), `[K + 1, K + 1]`; the last row is the output's.
    streams: C^(i), `[N, K, K + 1]`.
    inputs_deviation: standard deviation of C^(0) over tokens.
    tokens: number of tokens; 0 for static weights alone.
    attention: the sub-layers with attention, counted from zero; None without a model.
    """

    inputs: torch.Tensor
    streams: torch.Tensor
    inputs_deviation: torch.Tensor
    tokens: int
    attention: tuple[int, ...] | None = None


class Unfolding:
    """Unfolds the connections token by token while a model runs, and averages the matrices.

    The mean of products is not the product of means, so coefficients are never averaged. Frac-connections, whose
    branches read N parts, have the mean over parts.

    sub_layers: K.
    readout: "sum", "mean" or the weights `[N]` of a weighted readout; see `readout_weights`.
    """

    def __init__(self, sub_layers: int, readout: str | torch.Tensor = "mean"):
        self.sub_layers, self.readout = sub_layers, readout
        self.rows = [Moments() for _ in range(sub_layers + 1)]
        self.stream_rows = [Moments() for _ in range(sub_layers)]
        self.weights: torch.Tensor  # from sub-layer 0 on
        self.read: torch.Tensor  # the input of the last branch that reads

    def see(self, seen: Observation) -> None:
        """Take in a sub-layer of a forward; they come in order."""
        self.step(seen.place, seen.alpha, seen.beta, seen.has_read)

    def step(self, k: int, alpha: torch.Tensor, beta: torch.Tensor, reads: bool = True) -> None:
        """Go through sub-layer k with A `[B, S, N, reads + N]` and b `[B, S, N]`.

        reads: whether its branch reads the streams; else its input is the earlier branch's.
        """
        alpha, beta = alpha.flatten(0, -3), beta.flatten(0, -2)
        n = beta.shape[-1]
        if k == 0:
            # the weights of all writers in each stream, `[T, N, K + 1]`
            self.weights = alpha.new_zeros(*beta.shape, self.sub_layers + 1)
            self.weights[..., 0] = 1
        products = alpha.transpose(-1, -2) @ self.weights.to(alpha.device)
        self.weights = products[..., -n:, :].contiguous()
        if reads:
            self.read = products[..., :-n, :].mean(-2)
        self.rows[k].add(self.read)
        self.stream_rows[k].add(self.weights)
        self.weights[..., k + 1] += beta
        if k == self.sub_layers - 1:
            self.rows[-1].add(self._read_out())

    def _read_out(self) -> torch.Tensor:
        if isinstance(self.readout, torch.Tensor):
            return self.readout.to(self.weights) @ self.weights
        return self.weights.sum(-2) if self.readout == "sum" else self.weights.mean(-2)

    def result(self) -> ConnectionMatrices:
        """Return the matrices of the sub-layers seen so far."""
        return ConnectionMatrices(
            inputs=torch.stack([torch.as_tensor(row.mean) for row in self.rows]),
            streams=torch.stack([torch.as_tensor(row.mean) for row in self.stream_rows], dim=1),
            inputs_deviation=torch.stack([row.deviation for row in self.rows]),
            tokens=self.rows[-1].count,
        )


def readout_weights(model: Any) -> str | torch.Tensor:
    """Return a model's readout for `Unfolding`: "sum", "mean" or weights `[N]`.

    A learned readout, whose weights each token predicts, counts as its start, the mean.
    """
    for _, module in modules_in_use(model):
        if any(name == "static_gamma" for name, _ in module.named_parameters(recurse=False)):
            with with_parameters(module):
                return module.get_parameter("static_gamma").detach().clone()
    config = config_of(model)
    return getattr(connection_config(config), "hc_readout", "mean")


def unfold_static(model: PreTrainedModel, stack: str | None = None) -> ConnectionMatrices:
    """Unfold the static weights of a model's connections, without dynamic terms.

    The static weights of mHC and iHC follow from their biases.

    stack: "encoder" or "decoder" of an encoder-decoder; None for the decoder.

    Raises `HyperConnError` for a model without streams that matrices read and mix, such as a base model.
    """
    part = with_layers(model, stack)
    connections, copying = connections_of(part), without_reads(part)
    if not connections:
        raise HyperConnError(
            f"{type(model).__name__} has no streams that matrices read and mix, so none to unfold. Give a model with "
            f"connections of another kind, such as 'dhc'."
        )
    unfolding = Unfolding(len(connections), readout_weights(part))
    for k, (name, connection) in enumerate(connections.items()):
        alpha, beta = _static_part(connection)
        unfolding.step(k, alpha[None], beta[None], name not in copying)
    return replace(unfolding.result(), tokens=0, attention=attention_of(part))


@torch.no_grad()
def _static_part(connection: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A and b of a connection, static."""
    with with_parameters(connection):
        if hasattr(connection, "static_alpha"):
            return connection.static_alpha.detach().clone(), connection.static_beta.detach().clone()
        # the projection of streams of zeros is zero
        zeros = next(connection.parameters()).new_zeros(1, 1, connection.hc_mult, connection.hidden_size)
        alpha, beta = connection.matrices(zeros)
    return alpha[0, 0], beta[0, 0]


def unfold(
    matrices: Iterable[tuple[torch.Tensor, torch.Tensor]], readout: str | torch.Tensor = "mean"
) -> ConnectionMatrices:
    """Unfold static connections with A `[N, reads + N]` and b `[N]` of each sub-layer."""
    matrices = list(matrices)
    unfolding = Unfolding(len(matrices), readout)
    for k, (alpha, beta) in enumerate(matrices):
        unfolding.step(k, alpha[None], beta[None])
    return unfolding.result()
