"""The rows of the table: a kind of connection, a kind of readout, and the four readouts that a config can choose.

Letters: N streams, D hidden size, L decoder layers of P sub-layers (most have two), K = P L sub-layers and as many
connections. A `config` is a config.json, or the result of a config's `to_dict`; it may lack fields of connections.
`norm` contains the initial value of each parameter of a family's norm, by name.
"""

import math
from collections.abc import Iterable, Mapping
from math import prod
from typing import ClassVar

import numpy as np

from ..errors import UnsupportedCheckpointError
from ..families.family import find_family, name_of_family
from ..models.connection_fields import FIELDS
from ..models.sub_layers import SUB_LAYERS, SubLayer

Values = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]

NORM = 4  # operations on each value: square, sum, divide, multiply by the weight
SCALE = 0.01


def field_value(config: Mapping, name: str):
    """Return a field of connections, or its default."""
    return config.get(name, FIELDS[name])


def sub_layers_of(config: Mapping) -> tuple[SubLayer, ...]:
    """Return the sub-layers of a decoder layer; attention and an MLP for an unknown model type."""
    try:
        return find_family(name_of_family(config)).sub_layers
    except UnsupportedCheckpointError:
        return SUB_LAYERS


def count_sub_layers(config: Mapping) -> int:
    """Return K, the number of sub-layers, each with its connection."""
    return len(sub_layers_of(config)) * config["num_hidden_layers"]


def place_of(k: int, parts: tuple[SubLayer, ...]) -> tuple[int, SubLayer]:
    """Return the index of the decoder layer of sub-layer k, and the sub-layer."""
    layer, place = divmod(k, len(parts))
    return layer, parts[place]


class Kind:
    """One kind of connection; a subclass with a `name` is a row of the table.

    The table of `models/connection_fields.py` says which fields a config with it accepts.

    name: the value of the field `connection`.
    title, paper: its name for people, and its number on arXiv.
    is_rounded: whether a conversion equals its base in float32 only up to rounding.
    has_matrices: whether matrices read and mix the streams, so that they can be unfolded and observed.
    extends_hyper_connections: whether its paper extends the paper of hyper-connections.
    readout: its only readout; None for the config's choice.
    """

    rows: ClassVar[dict[str, "Kind"]] = {}
    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    is_rounded: ClassVar[bool] = False
    has_matrices: ClassVar[bool] = True
    extends_hyper_connections: ClassVar[bool] = True
    readout: "ClassVar[Readout | None]" = None

    def __init_subclass__(cls):
        if "name" in vars(cls):
            cls.rows[cls.name] = cls()

    @property
    def link(self) -> str:
        """Return the address of the paper, or of the code that the kind comes from."""
        return f"https://arxiv.org/abs/{self.paper}"

    def suffix(self, n: int) -> str:
        """Return the end of a conversion's name, after the name of its base."""
        return f"HCx{n}"

    def streams(self, config: Mapping) -> str:
        """Describe the streams of a model, for its card."""
        n = config["hc_mult"]
        text = f"{n} residual stream{'s' * (n != 1)}"
        if field_value(config, "hc_start") == "history":
            text += f" (started from the history, by {field_value(config, 'hc_history')})"
        return text

    def between_layers(self, config: Mapping) -> str | None:
        """Name the values that layers hand on; None for one stream, as in a base."""
        n = config["hc_mult"]
        return f"{n} streams" if n > 1 else None

    def rows_between_layers(self, config: Mapping) -> int | None:
        """Count the rows of D values that a layer hands on for a token; None if they grow from layer to layer."""
        return config["hc_mult"]

    def settings(self, config: Mapping) -> list[str]:
        """List the settings of a config, for people."""
        chosen = [f"n={config['hc_mult']}"]
        if field_value(config, "hc_start") == "history":
            chosen.append(f"started from the history by {field_value(config, 'hc_history')}")
        elif field_value(config, "hc_start") != "copies":
            chosen.append(f"start {field_value(config, 'hc_start')}")
        readout = field_value(config, "hc_readout")
        return chosen + [f"readout {readout}"] * (readout != FIELDS["hc_readout"])

    def has_parameters(self, config: Mapping, k: int) -> bool:
        """Return whether the connection around sub-layer k has parameters."""
        return True

    def shapes(self, config: Mapping, norm: Iterable[str]) -> Shapes:
        """Return the shapes of each connection's parameters."""
        raise NotImplementedError

    def values(self, config: Mapping, norm: Mapping[str, float], k: int) -> Values:
        """Return the parameters around sub-layer k at the equivalent initialization, float32."""
        raise NotImplementedError

    def drift(self, stored: Values, initial: Values, config: Mapping) -> tuple[float, float, float]:
        """Return `alpha`, `beta` and `dynamic` of a `Drift`."""
        raise NotImplementedError

    def parameters(self, config: Mapping, norm: Iterable[str]) -> int:
        """Count the parameters of all connections."""
        return count_sub_layers(config) * sum(map(prod, self.shapes(config, norm).values()))

    def flops(self, config: Mapping) -> int:
        """Count the operations of all connections in the forward of one token, without tanh and Sinkhorn."""
        raise NotImplementedError

    def kept_for_backward(self, config: Mapping) -> tuple[int, int]:
        """Count the values that all connections keep for one token: rows of D of the streams' dtype, and float32."""
        raise NotImplementedError


class Readout:
    """One kind of readout, which the field `hc_readout` of a config or its connection chooses."""

    def shapes(self, config: Mapping, norm: Iterable[str]) -> Shapes:
        """Return the shapes of the parameters of the module `hc_head`."""
        return {}

    def values(self, config: Mapping, norm: Mapping[str, float]) -> Values:
        """Return its parameters at the equivalent initialization, float32."""
        return {}

    def flops(self, config: Mapping) -> int:
        """Count the operations in the forward of one token."""
        raise NotImplementedError


def float32(**values) -> Values:
    """Return the values as float32 arrays."""
    return {name: np.asarray(value, np.float32) for name, value in values.items()}


def largest_change(stored: Values, initial: Values, name: str) -> float:
    """Return the largest absolute change of a parameter."""
    return float(np.abs(stored[name] - initial[name]).max())


class Mean(Readout):
    """The mean of the streams, or their sum."""

    def flops(self, config):
        return config["hc_mult"] * config["hidden_size"]


class Joined(Readout):
    """One stream, or parts side by side."""

    def flops(self, config):
        return 0


class Weighted(Readout):
    """`WeightedReadout`."""

    def shapes(self, config, norm):
        return {"static_gamma": (config["hc_mult"],)}

    def values(self, config, norm):
        n = config["hc_mult"]
        is_history = field_value(config, "hc_start") == "history"
        return float32(static_gamma=np.eye(n)[0] if is_history else np.full(n, 1 / n))

    def flops(self, config):
        return 2 * config["hc_mult"] * config["hidden_size"]


class Learned(Readout):
    """`LearnedReadout`."""

    def shapes(self, config, norm):
        n = config["hc_mult"]
        return {"hc_fn": (n, n * config["hidden_size"]), "hc_base": (n,), "hc_scale": (1,)}

    def values(self, config, norm):
        shapes, weight = self.shapes(config, norm), 1 / config["hc_mult"] - field_value(config, "hc_eps")
        base = np.full(shapes["hc_base"], math.log(weight / (1 - weight)))
        return float32(hc_fn=np.zeros(shapes["hc_fn"]), hc_base=base, hc_scale=np.full(1, SCALE))

    def flops(self, config):
        n, d = config["hc_mult"], config["hidden_size"]
        return 2 * n * n * d + (NORM - 1) * n * d + 2 * n * d


READOUTS: dict[str, Readout] = {"mean": Mean(), "sum": Mean(), "learned": Learned(), "weighted": Weighted()}
