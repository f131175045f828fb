# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The sub-layers of a decoder layer, in their order, and what connections are called in the names of weights.

k counts sub-layers over the whole model, from zero.
"""

from typing import NamedTuple


class SubLayer(NamedTuple):
    """A branch and the connection around it.

    connection, branch: a module and a method of the decoder layer.
    name: for people.
    """

    connection: str
    branch: str
    name: str


SUB_LAYERS = (SubLayer("attn_hc", "attention_branch", "attention"), SubLayer("mlp_hc", "mlp_branch", "mlp"))
CONNECTIONS = tuple(sub_layer.connection for sub_layer in SUB_LAYERS)
ADDED = (*CONNECTIONS, "hc_head")  # the modules that a decoder layer has besides its base's; the last has the readout


def number_of_sub_layers(layers: int) -> int:
    """K, of so many decoder layers."""
    return len(SUB_LAYERS) * layers


def place_of(k: int) -> tuple[int, SubLayer]:
    """The decoder layer of sub-layer k, counted from zero, and which of its sub-layers it is."""
    layer, place = divmod(k, len(SUB_LAYERS))
    return layer, SUB_LAYERS[place]


def is_of_connection(name: str) -> bool:
    """Whether a parameter's name is that of a hyper-connection or of a readout."""
    return not set(ADDED).isdisjoint(name.split("."))
