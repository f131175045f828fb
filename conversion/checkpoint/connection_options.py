"""The fields of connections that a conversion accepts, and their options on the command line."""

import argparse
from typing import TYPE_CHECKING, Any

from hf_hyperconn.errors import ConversionError
from hf_hyperconn.kinds import KINDS
from hf_hyperconn.models.connection_fields import (
    CHOICES,
    FIELDS,
    GivenFields,
    complete,
    convertible,
    one_of,
    refusal_of_fields,
    unknown_fields,
    unread_field,
)

if TYPE_CHECKING:
    from typing import Unpack

# of the command line, by field
OPTIONS = {
    "hc_mult": "--hc-mult",
    "connection": "--connection",
    "hc_readout": "--readout",
    "hc_start": "--start",
    "hc_history": "--history",
    "hc_block": "--block",
    "hc_selection": "--selection",
    "hc_sinkhorn_iters": "--sinkhorn-iters",
    "hc_eps": "--eps",
    "hc_tanh": "--tanh",
}
# readouts whose conversions don't equal their bases bit for bit, and why
INEXACT = {
    "sum": "the final norm's eps has less effect on a sum",
    "learned": "weights that are predicted are rounded",
}
MEANINGS = {
    "hc_mult": "residual streams (default: 4; attnres has 1, skip has 2)",
    "connection": "shc: static, dhc: dynamic (default), mhc: manifold-constrained, ihc: the same without mixing, "
    "frac: frac-connections, attnres: attention residuals, altup: AltUp, skip: skips from the embedding",
    "hc_readout": "mean of the streams (default), or a sum with learned weights (default with --start history)",
    "hc_start": "initial streams of shc and dhc: copies of the residual stream (default) or parts of its history",
    "hc_history": "with --start history: division by type of sub-layer or by depth (default: type)",
    "hc_block": "with attnres: number of sub-layers summed to one value (default: 1)",
    "hc_selection": "with altup: read the streams in turn, or always the first (default: alternating)",
    "hc_sinkhorn_iters": "with mhc: number of normalizations of the mix (default: 20)",
    "hc_eps": "eps of mhc, ihc, attnres and skip (default: 1e-6)",
    "hc_tanh": "tanh on the dynamic part of dhc and frac (default: on)",
}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Give a command the options of connections. Options that are left out are None."""
    for name, option in OPTIONS.items():
        how: dict[str, Any] = {"type": type(FIELDS[name]), "metavar": "X" if name == "hc_eps" else "N"}
        if name in CHOICES:
            how = {"choices": exact_values(name)}
        elif FIELDS[name] is True:
            how = {"action": argparse.BooleanOptionalAction}
        short = ["-n"] if name == "hc_mult" else []
        parser.add_argument(*short, option, dest=name, help=MEANINGS[name], **how)


def exact_values(field: str) -> tuple:
    """Return the values of a field with which a conversion is exact."""
    return tuple(value for value in convertible(field) if field != "hc_readout" or value not in INEXACT)


def fields_of_conversion(**given: "Unpack[GivenFields]") -> dict[str, Any]:
    """Complete the given fields of connections, with a readout that keeps the conversion exact.

    Raises `ConversionError` for fields that no conversion accepts.
    """
    fields = complete(given)
    if fault := unknown_fields(given) or refusal_of_fields(given) or unread_field(given):
        raise ConversionError(f"{fault}.")
    if because := INEXACT.get(readout := fields["hc_readout"]):
        raise ConversionError(
            f"hc_readout must be {one_of(exact_values('hc_readout'))} in a folder that equals its base "
            f"(got {readout!r}): {because}. Give another, or convert in memory (convert_model)."
        )
    return fields


def describe(fields: dict[str, Any]) -> str:
    """Describe fields for people."""
    return ", ".join([fields["connection"], *KINDS[fields["connection"]].settings(fields)])
