# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The sub-layers of a decoder layer, in their order, and the names of connections in the names of weights.

k counts sub-layers over the whole model, from zero. Most layers have two, attention and an MLP.
"""

import re
from typing import NamedTuple


class SubLayer(NamedTuple):
    """A branch and the connection around it.

    connection, branch: a module and a method of the decoder layer.
    name: for people.
    given: argument of the layer without which the branch is left out, such as an encoder's output; None for none.
    after: method of the layer that changes each stream by itself after the addition; None for none.
    reads: whether the branch reads the stream; else it adds a value of an earlier branch.
    """

    connection: str
    branch: str
    name: str
    given: str | None = None
    after: str | None = None
    reads: bool = True


SUB_LAYERS = (SubLayer("attn_hc", "attention_branch", "attention"), SubLayer("mlp_hc", "mlp_branch", "mlp"))
READOUT = "hc_head"  # the module of the last layer that reads the streams out
# names of the modules that a decoder layer has besides its base's
CONNECTION_NAME = re.compile(rf"(?:^|\.)(?:\w+_hc|{READOUT})(?=\.|$)")


def is_of_connection(name: str) -> bool:
    """Tell whether a name belongs to a parameter of a connection or a readout."""
    return CONNECTION_NAME.search(name) is not None


def written_streams(sub_layer: int, sub_layers: int, hc_mult: int, history: str, parts: int = 2) -> tuple[int, ...]:
    """Return the streams that sub-layer k writes at the history start: 0 and its side stream, if it has one.

    Stream 0 is the residual stream of the base, and the only one that branches and the readout read. The side streams,
    1 to N - 1, hold the embedding and what a part of the sub-layers wrote:

        A_m = e_0      A_r = I      b_k = e_0 + e_j, for the side stream j of sub-layer k

    All products are by 0 or 1, so a model equals its base. But read weights of side streams get gradients of their own
    at the first step. The read weights of N equal streams share one gradient.

    sub_layer, sub_layers: k, and the number of sub-layers.
    hc_mult: N.
    history: "depth" cuts the sub-layers into N - 1 runs, one for each side stream. With N = 2 the only side stream
        gets the first half, because all sub-layers would make stream 0 again. "type" gives attention the first side
        streams and MLPs the next ones, with runs of layers for several. With N >= 4 the last side stream contains the
        embedding alone; with N = 2 only attention has one.
    parts: the number of sub-layers of a decoder layer, each of a type; two are attention and an MLP.
    """
    sides = hc_mult - 1
    if sides == 0:
        return (0,)
    if history == "depth":
        run = sub_layer * max(sides, 2) // sub_layers
        return (0, 1 + run) if run < sides else (0,)
    written = sides - (sides > 2)
    layer, place = divmod(sub_layer, parts)
    layers = sub_layers // parts
    shares = [(written + parts - 1 - part) // parts for part in range(parts)]
    runs, first = shares[place], 1 + sum(shares[:place])
    return (0, first + layer * runs // layers) if runs else (0,)
