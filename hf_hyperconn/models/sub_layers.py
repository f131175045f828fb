# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The sub-layers of a decoder layer, in their order, and what connections are called in the names of weights.

k counts sub-layers over the whole model, from zero. Most layers have two, attention and an MLP.
"""

import re
from typing import NamedTuple


class SubLayer(NamedTuple):
    """A branch and the connection around it.

    connection, branch: a module and a method of the decoder layer.
    name: for people.
    given: an argument of the layer without which the branch is left out, as what an encoder made; None for none.
    after: a method of the layer that changes each stream by itself after the branch is added; None for none.
    reads: whether the branch reads the stream, or adds what an earlier branch of the layer has made.
    """

    connection: str
    branch: str
    name: str
    given: str | None = None
    after: str | None = None
    reads: bool = True


SUB_LAYERS = (SubLayer("attn_hc", "attention_branch", "attention"), SubLayer("mlp_hc", "mlp_branch", "mlp"))
CONNECTIONS = tuple(sub_layer.connection for sub_layer in SUB_LAYERS)
READOUT = "hc_head"  # the module of the last layer that reads the streams out
ADDED = re.compile(rf"(?:^|\.)(?:\w+_hc|{READOUT})(?=\.|$)")  # what a decoder layer has besides its base's


def place_of(k: int, parts: tuple[SubLayer, ...] = SUB_LAYERS) -> tuple[int, SubLayer]:
    """The decoder layer of sub-layer k, counted from zero, and which of its sub-layers it is.

    parts: the sub-layers of one decoder layer.
    """
    layer, place = divmod(k, len(parts))
    return layer, parts[place]


def is_of_connection(name: str) -> bool:
    """Whether a parameter's name is that of a hyper-connection or of a readout."""
    return ADDED.search(name) is not None
