"""What the table says of one kind of connection, and of one kind of readout.

Letters: N streams, D hidden size, L decoder layers of P sub-layers (most have two), K = P L sub-layers and as many
connections. A `config` is a config.json, or what a config's `to_dict` returns; of the fields of connections it may
lack any. `norm` has, by name, the initial value of each parameter of a family's norm.
"""

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any, ClassVar

import numpy as np

from ..errors import UnsupportedCheckpointError
from ..families import find_family, name_of_family
from ..models.sub_layers import SUB_LAYERS, SubLayer

Values = dict[str, np.ndarray]
Shapes = dict[str, tuple[int, ...]]

# the fields of `HyperConnectionConfig`, with their defaults
FIELDS: dict[str, Any] = {
    "connection": "dhc",
    "hc_mult": 4,
    "hc_tanh": True,
    "hc_readout": "mean",
    "hc_start": "copies",
    "hc_history": "type",
    "hc_block": 1,
    "hc_attention": "sum",
    "hc_selection": "alternating",
    "hc_sinkhorn_iters": 20,
    "hc_eps": 1e-6,
    "norm": None,
    "norm_alpha_attention": None,
    "norm_alpha_other": None,
}
FORMAT = 1  # of folders: names of parameters, fields of the config; older ones, without the field, are of the first
NORM = 4  # operations on each value: square, sum, divide, multiply by the weight
SCALE = 0.01


def setting(config: Mapping, name: str):
    """A field of connections, or its default."""
    return config.get(name, FIELDS[name])


def parts(config: Mapping) -> tuple[SubLayer, ...]:
    """The sub-layers of a decoder layer; those of most, where the model type is not one of Transformers'."""
    try:
        return find_family(name_of_family(config)).sub_layers
    except UnsupportedCheckpointError:
        return SUB_LAYERS


def sub_layers(config: Mapping) -> int:
    """K, the number of sub-layers, each with its connection."""
    return len(parts(config)) * config["num_hidden_layers"]


class Kind:
    """One kind of connection, as the field `connection` of a config names it.

    title, paper: what to call it, and its number on arXiv.
    no_equivalent: why no Pre-Norm model computes the same; None for a kind that models can be converted to.
    no_history: why it can't start from the history; None for a kind that can.
    is_rounded: whether a conversion equals its base in float32 only up to rounding.
    least, most: the smallest and the largest number of streams.
    has_matrices: whether matrices read and mix the streams, so that they can be unfolded and watched.
    extends_hyper_connections: whether its paper extends that of hyper-connections.
    fields: those of a config, besides `connection` and `hc_mult`, that a conversion to it lets choose.
    readout: the one that it always has; None for the config's choice.
    """

    name: ClassVar[str]
    title: ClassVar[str]
    paper: ClassVar[str]
    no_equivalent: ClassVar[str | None] = None
    no_history: ClassVar[str | None] = None
    is_rounded: ClassVar[bool] = False
    least: ClassVar[int] = 1
    most: ClassVar[int | None] = None
    has_matrices: ClassVar[bool] = True
    extends_hyper_connections: ClassVar[bool] = True
    fields: ClassVar[tuple[str, ...]] = ()
    readout: "ClassVar[Readout | None]" = None

    @property
    def default_streams(self) -> int:
        """N where none is given."""
        return FIELDS["hc_mult"] if self.most is None else self.most

    def suffix(self, n: int) -> str:
        """What follows the name of a base in that of its conversion."""
        return f"HCx{n}"

    def streams(self, config: Mapping) -> str:
        """What a model carries from layer to layer, for its card."""
        n = config["hc_mult"]
        text = f"{n} residual stream{'s' * (n != 1)}"
        if setting(config, "hc_start") == "history":
            text += f" (started from the history, by {setting(config, 'hc_history')})"
        return text

    def handed_on(self, config: Mapping) -> str | None:
        """What layers hand on where a base's hand on one stream; None when that is one stream, too."""
        n = config["hc_mult"]
        return f"{n} streams" if n > 1 else None

    def settings(self, config: Mapping) -> list[str]:
        """What a config chooses of it, for people."""
        chosen = [f"n={config['hc_mult']}"]
        if setting(config, "hc_start") == "history":
            chosen.append(f"started from the history by {setting(config, 'hc_history')}")
        elif setting(config, "hc_start") != "copies":
            chosen.append(f"start {setting(config, 'hc_start')}")
        readout = setting(config, "hc_readout")
        return chosen + [f"readout {readout}"] * (readout != FIELDS["hc_readout"])

    def fault(self, config: Mapping) -> str | None:
        """What keeps a config from having this kind, by its own fields; None when nothing does."""
        n = config["hc_mult"]
        if n < self.least:
            return f"hc_mult {n}, too few for {self.name!r}"
        if self.most is not None and n > self.most:
            return f"hc_mult {n}, too many for {self.name!r}"
        if setting(config, "hc_start") == "history" and self.no_history:
            return f"hc_start 'history', but {self.no_history}"
        return None

    def fault_of_start(self, config: Mapping) -> str | None:
        """What keeps a config that has no such fault from an equivalent initialisation; None when nothing does."""
        return None

    def inequivalence(self, config: Mapping) -> str | None:
        """Why no Pre-Norm model computes what one with this config does at its start; None when one does."""
        if self.no_equivalent:
            return self.no_equivalent
        if setting(config, "hc_start") == "biased":
            return "reads of streams with the biased start don't sum to 1"
        if setting(config, "norm") is not None:
            return "DyT and Derf compute another function than a norm"
        return None

    def shapes(self, config: Mapping, norm: Iterable[str]) -> Shapes:
        """The parameters of each connection."""
        raise NotImplementedError

    def values(self, config: Mapping, norm: Mapping[str, float], k: int) -> Values:
        """The parameters around sub-layer k at the equivalent initialisation, float32."""
        raise NotImplementedError

    def drift(self, stored: Values, initial: Values, config: Mapping) -> tuple[float, float, float]:
        """`alpha`, `beta` and `dynamic` of a `Drift`."""
        raise NotImplementedError

    def parameters(self, config: Mapping, norm: Iterable[str]) -> int:
        """Parameters of all connections."""
        return sub_layers(config) * sum(map(prod, self.shapes(config, norm).values()))

    def flops(self, config: Mapping) -> int:
        """Operations of all connections in the forward of one token, without coefficients' own (tanh, Sinkhorn)."""
        raise NotImplementedError

    def kept(self, config: Mapping) -> tuple[int, int]:
        """For one token, all connections: rows of D values in the dtype of the streams, and float32 values, kept."""
        raise NotImplementedError


class Readout:
    """One kind of readout, as the field `hc_readout` of a config names it, or as a connection always has it."""

    def shapes(self, config: Mapping, norm: Iterable[str]) -> Shapes:
        """Its parameters, those of the module `hc_head`."""
        return {}

    def values(self, config: Mapping, norm: Mapping[str, float]) -> Values:
        """Its parameters at the equivalent initialisation, float32."""
        return {}

    def flops(self, config: Mapping) -> int:
        """Operations in the forward of one token."""
        raise NotImplementedError


def float32(**values) -> Values:
    """The values as float32 arrays."""
    return {name: np.asarray(value, np.float32) for name, value in values.items()}


def largest_change(stored: Values, initial: Values, name: str) -> float:
    """The largest absolute change of a parameter."""
    return float(np.abs(stored[name] - initial[name]).max())
