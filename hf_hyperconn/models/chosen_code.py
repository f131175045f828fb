# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The code that the fields of a config choose: for its connection, its readout and its norm.

Each import of code is a row, and its name is the value of a field. A connection with a readout of its own has a second
row, with an ending. A saved model contains the rows of its own config, and so only their files (`shipped_code.py`).

Most functions accept a decoder layer; a connection's also accepts k and the number of sub-layers.
"""
# ruff: noqa: F401

from collections.abc import Callable

from torch import nn

from .altup_connection import altup
from .attention_residuals import attention_readout as attnres_readout
from .attention_residuals import attention_residual as attnres
from .connection_fields import CHOICES
from .dual_residual import dual, dual_readout
from .dynamic_activations import dynamic_activations as derf
from .dynamic_activations import dynamic_activations as dyt
from .embedding_skip import skip
from .frac_connections import frac
from .hyper_connections import dynamic as dhc
from .hyper_connections import static as shc
from .keel_connection import keel
from .manifold_hyper_connections import identity as ihc
from .manifold_hyper_connections import manifold as mhc
from .readouts import learned, weighted


def rows_of(field: str, ending: str = "") -> dict[str, Callable]:
    """Return the imports above that are named by a field's values with an ending, by value."""
    names = {value: f"{value}{ending}" for value in CHOICES[field]}
    return {value: globals()[name] for value, name in names.items() if name in globals()}


CONNECTIONS = rows_of("connection")
READOUTS = rows_of("hc_readout")  # a connection itself computes "mean" and "sum"
OWN_READOUTS = rows_of("connection", "_readout")
NORMS = rows_of("norm")


def readout_maker(config) -> Callable | None:
    """Return the function that makes the readout of a config; None if its connection computes the readout."""
    return OWN_READOUTS.get(config.connection, READOUTS.get(config.hc_readout))


def replace_norms(module: nn.Module, config) -> None:
    """Replace every norm inside `module` by the function that a config chooses."""
    if config.norm is not None:
        NORMS[config.norm](module, config)


def refuse_others(config) -> None:
    """Refuse a config whose code is missing, as in a checkpoint with the code of its own config."""
    for field, accepted in (
        ("connection", [*CONNECTIONS]),
        ("hc_readout", ["mean", "sum", *READOUTS]),
        ("norm", [None, *NORMS]),
    ):
        if (value := getattr(config, field)) not in accepted:
            raise ValueError(
                f"{field} must be {' or '.join(map(repr, accepted))} (got {value!r}). A checkpoint brings the code "
                f"of its own config alone: install hf_hyperconn, which has all."
            )
