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
    given: an argument of the layer without which the branch is left out, such as an encoder's output; None for none.
    after: a method of the layer that changes each stream by itself after the branch is added; None for none.
    reads: whether the branch reads the stream, or adds a value of an earlier branch of the layer.
    """

    connection: str
    branch: str
    name: str
    given: str | None = None
    after: str | None = None
    reads: bool = True


SUB_LAYERS = (SubLayer("attn_hc", "attention_branch", "attention"), SubLayer("mlp_hc", "mlp_branch", "mlp"))
READOUT = "hc_head"  # the module of the last layer that reads the streams out
ADDED = re.compile(rf"(?:^|\.)(?:\w+_hc|{READOUT})(?=\.|$)")  # modules that a decoder layer has besides its base's


def is_of_connection(name: str) -> bool:
    """Tell whether a name is that of a connection's parameter, or of a readout's."""
    return ADDED.search(name) is not None
