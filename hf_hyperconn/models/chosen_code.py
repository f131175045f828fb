# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""What the fields of a config choose: the code of its connection, its readout, its start and its norm.

A saved model brings this file with the rows that its own config chooses (`shipped_code.py`), and so the files of these
alone. Most entries are functions of a decoder layer; those of connections are told k, too, and how many sub-layers
there are.
"""

from collections.abc import Callable

from torch import nn

from .altup_connection import altup
from .attention_residuals import attention_readout, attention_residual
from .dual_residual import dual, dual_readout
from .dynamic_activations import dynamic_activations
from .frac_connections import frac
from .history_start import written_streams
from .hyper_connections import dynamic, static
from .keel_connection import keel
from .learned_readout import learned
from .manifold_hyper_connections import identity, manifold
from .old_places import warn_of_old_places
from .weighted_readout import weighted

CONNECTIONS: dict[str, Callable] = {
    "shc": static,
    "dhc": dynamic,
    "mhc": manifold,
    "ihc": identity,
    "frac": frac,
    "keel": keel,
    "attnres": attention_residual,
    "altup": altup,
    "dual": dual,
}
# beside "mean" and "sum", which a connection computes by itself
READOUTS: dict[str, Callable] = {
    "learned": learned,
    "weighted": weighted,
}
# of connections that always have the same
OWN_READOUTS: dict[str, Callable] = {
    "attnres": attention_readout,
    "dual": dual_readout,
}
# beside those that a connection makes by itself; written_streams is told k and N, not the layer
STARTS: dict[str, Callable] = {
    "history": written_streams,
}
NORMS: dict[str, Callable] = {
    "dyt": dynamic_activations,
    "derf": dynamic_activations,
}
# of a model that is saved
WARNINGS: dict[str, Callable] = {
    "keel": warn_of_old_places,
    "attnres": warn_of_old_places,
    "altup": warn_of_old_places,
}


def readout_of(config) -> Callable | None:
    """Return what makes the readout of a config; None where its connection computes it."""
    return OWN_READOUTS.get(config.connection, READOUTS.get(config.hc_readout))


def replace_norms(module: nn.Module, config) -> None:
    """Put what a config chooses in the place of every norm inside `module`."""
    if config.norm is not None:
        NORMS[config.norm](module, config)


def refuse_others(config) -> None:
    """Make sure that what a config chooses is here.

    Raises `ValueError` when it is not: a checkpoint brings what its own config chooses.
    """
    for field, accepted in (
        ("connection", [*CONNECTIONS]),
        ("hc_readout", ["mean", "sum", *READOUTS]),
        ("hc_start", ["copies", "biased", *STARTS]),
        ("norm", [None, *NORMS]),
    ):
        if (asked := getattr(config, field)) not in accepted:
            raise ValueError(
                f"{field} must be {' or '.join(map(repr, accepted))} (got {asked!r}). A checkpoint brings the code "
                f"of its own config alone: install hf_hyperconn, which has all."
            )
