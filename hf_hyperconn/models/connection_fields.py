# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The fields of connections: their defaults, the values that each kind accepts, and why others are refused.

Configs, `from_prenorm`, `convert_model`, the converter and its command line read them here.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from math import inf
from typing import Any, Literal, TypedDict, get_args, get_origin

SMALLEST_EPS = 1e-30  # whose inverse root float32 represents
FORMAT = 1  # of folders: names of parameters, fields of the config; older ones, without the field, are of the first
# at the start of mHC and iHC
FAVOURED_READ = 0.7  # of stream k mod n, by sub-layer k; the others share the rest
KEPT_SHARE = 0.96  # of each stream, by mixing, before the iteration; the others share the rest


@dataclass(frozen=True)
class Accepted:
    """The values that a config accepts with one kind of connection.

    least, most: the smallest and the largest number of streams.
    starts: the values of `hc_start`.
    reads: fields that it reads, and that some other kind does not.
    own_readout: why its readout can't be chosen; None if it can.
    no_equivalent: why no Pre-Norm model computes the same; None for a kind of conversions.
    """

    least: int = 1
    most: int | None = None
    starts: tuple[str, ...] = ("copies",)
    reads: tuple[str, ...] = ()
    own_readout: str | None = None
    no_equivalent: str | None = None


ACCEPTED = {
    "shc": Accepted(starts=("copies", "history"), reads=("hc_history",)),
    "dhc": Accepted(starts=("copies", "history"), reads=("hc_history", "hc_tanh")),
    "mhc": Accepted(least=2, starts=("copies", "biased"), reads=("hc_sinkhorn_iters", "hc_eps")),
    "ihc": Accepted(least=2, starts=("copies", "biased"), reads=("hc_eps",)),
    "frac": Accepted(reads=("hc_tanh",), own_readout="its parts are joined"),
    "keel": Accepted(
        most=1,
        own_readout="it has one stream",
        no_equivalent="Keel norms the residual stream itself after every sub-layer",
    ),
    "attnres": Accepted(
        most=1, reads=("hc_block", "hc_attention", "hc_eps"), own_readout="it has a readout of its own"
    ),
    "altup": Accepted(reads=("hc_selection",)),
    "dual": Accepted(
        least=2,
        most=2,
        own_readout="it has a readout of its own",
        no_equivalent="ResiDual norms one residual stream after every sub-layer",
    ),
    "skip": Accepted(least=2, most=2, reads=("hc_eps",), own_readout="the residual stream is read"),
}
Connection = Literal["shc", "dhc", "mhc", "ihc", "frac", "keel", "attnres", "altup", "dual", "skip"]
ReadoutName = Literal["mean", "sum", "learned", "weighted"]
Start = Literal["copies", "history", "biased"]
History = Literal["type", "depth"]
Attention = Literal["sum", "mean"]
Selection = Literal["alternating", "same"]
Norm = Literal["dyt", "derf"]


@dataclass(kw_only=True, repr=False)
class ConnectionFields:
    """The fields with their defaults; `HyperConnectionConfig` explains them."""

    connection: Connection = "dhc"
    hc_mult: int = 4
    hc_tanh: bool = True
    hc_readout: ReadoutName = "mean"
    hc_start: Start = "copies"
    hc_history: History = "type"
    hc_block: int = 1
    hc_attention: Attention = "sum"
    hc_selection: Selection = "alternating"
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    norm: Norm | None = None
    norm_alpha_attention: float | None = None
    norm_alpha_other: float | None = None


class GivenFields(TypedDict, total=False):
    """The fields that a conversion accepts; `hc_mult` and `hc_readout` follow from others where they are None."""

    connection: Connection
    hc_mult: int | None
    hc_tanh: bool
    hc_readout: ReadoutName | None
    hc_start: Start
    hc_history: History
    hc_block: int
    hc_attention: Attention
    hc_selection: Selection
    hc_sinkhorn_iters: int
    hc_eps: float
    norm: Norm | None
    norm_alpha_attention: float | None
    norm_alpha_other: float | None


FIELDS: dict[str, Any] = {field.name: field.default for field in fields(ConnectionFields)}
CHOICES: dict[str, tuple] = {
    field.name: get_args(field.type) for field in fields(ConnectionFields) if get_origin(field.type) is Literal
}
CHOICES["norm"] = (None, *get_args(Norm))
COUNT_FIELDS = ("hc_mult", "hc_block", "hc_sinkhorn_iters")
KIND_FIELDS = tuple(name for name in FIELDS if any(name in kind.reads for kind in ACCEPTED.values()))

# values with which no Pre-Norm model computes the same, and why
NOT_CONVERTED: dict[tuple[str, str], str] = {
    **{("connection", name): kind.no_equivalent for name, kind in ACCEPTED.items() if kind.no_equivalent},
    ("hc_start", "biased"): "reads of streams with the biased start don't sum to 1",
    ("hc_attention", "mean"): "a mean of the earlier outputs is not their sum",
    ("norm", "dyt"): "DyT and Derf compute another function than a norm",
    ("norm", "derf"): "DyT and Derf compute another function than a norm",
}


def convertible(field: str) -> tuple:
    """Return the values of a field that a conversion can have."""
    return tuple(value for value in CHOICES[field] if (field, value) not in NOT_CONVERTED)


def complete(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return all fields; missing ones follow from others, or have their defaults."""
    chosen = {name: value for name, value in given.items() if value is not None}
    most = ACCEPTED.get(chosen.get("connection", FIELDS["connection"]), Accepted()).most
    follow = {
        "hc_mult": FIELDS["hc_mult"] if most is None else most,
        "hc_readout": "weighted" if chosen.get("hc_start") == "history" else FIELDS["hc_readout"],
    }
    return {**FIELDS, **follow, **chosen}


def fault_of_fields(config: Mapping[str, Any], starts: tuple = CHOICES["hc_start"]) -> str | None:
    """Say why a config can't have its fields; None if it can.

    starts: the starts to offer.
    """
    config = {**FIELDS, **config}
    for name, accepted in CHOICES.items():
        if config[name] not in accepted:
            return _must_be(config, name, one_of(accepted))
    for name in COUNT_FIELDS:
        count = config[name]
        if not isinstance(count, int) or isinstance(count, bool) or count < 1:
            return _must_be(config, name, "a whole number, at least 1")
    tanh, eps = config["hc_tanh"], config["hc_eps"]
    if not isinstance(tanh, bool):
        return _must_be(config, "hc_tanh", "True or False")
    if not isinstance(eps, int | float) or not SMALLEST_EPS <= eps < inf:
        return _must_be(config, "hc_eps", f"a number, at least {SMALLEST_EPS}", because="zeros are normed with it")
    return _fault_of_kind(config, starts)


def _fault_of_kind(config: Mapping[str, Any], starts: tuple) -> str | None:
    """Say which field does not fit its connection or its start; None if all fit."""
    name, n, start = config["connection"], config["hc_mult"], config["hc_start"]
    kind, having = ACCEPTED[name], f"with connection {name!r}"
    if kind.most is not None and not kind.least <= n <= kind.most:
        return _must_be(config, "hc_mult", f"{kind.most} {having}")
    if n < kind.least:
        return _must_be(config, "hc_mult", f"at least {kind.least} {having}")
    if start not in kind.starts:
        others = one_of(name for name, other in ACCEPTED.items() if start in other.starts)
        accepted = one_of(name for name in kind.starts if name in starts)
        return _must_be(config, "hc_start", f"{accepted} {having}", because=f"{others} can start so")
    if kind.own_readout and config["hc_readout"] != "mean":
        return _must_be(config, "hc_readout", f"'mean' {having}", because=kind.own_readout)
    if start == "history" and config["hc_readout"] != "weighted":
        because = "stream 0 alone is read at the start"
        return _must_be(config, "hc_readout", "'weighted' with hc_start 'history'", because)
    if name == "frac" and config.get("hidden_size", 0) % n:
        return _must_be(config, "hc_mult", f"a divisor of hidden_size, {config['hidden_size']}, {having}")
    return None


def fault_of_start(config: Mapping[str, Any]) -> str | None:
    """Say why a config without other faults has no equivalent start; None if it has one."""
    config, smallest = {**FIELDS, **config}, 1.0
    n, eps = config["hc_mult"], config["hc_eps"]
    if config["connection"] in ("mhc", "ihc"):
        smallest = (1 - FAVOURED_READ) / (n - 1)
    if config["hc_readout"] == "learned":
        smallest = min(smallest, 1 / n)
    if smallest < 1 and eps >= smallest:
        accepted = f"at least {SMALLEST_EPS} and below {smallest:.3g}"
        return _must_be(config, "hc_eps", accepted, because="so much is read of a stream at the start")
    return None


def inequivalence(config: Mapping[str, Any]) -> str | None:
    """Say why no Pre-Norm model equals a model with this config at its start; None if one does."""
    return NOT_CONVERTED.get(_not_converted({**FIELDS, **config}))


def refusal_of_fields(given: Mapping[str, Any]) -> str | None:
    """Say why no conversion can have the given fields; None if one can."""
    config = complete(given)
    field, value = _not_converted(config)
    if field:
        because = f"{NOT_CONVERTED[field, value]}, so no pretrained model computes the same. Train a new model with it"
        return _must_be(config, field, f"{one_of(convertible(field))} in a conversion", because)
    return fault_of_fields(config, convertible("hc_start")) or fault_of_start(config)


def unknown_fields(given: Mapping[str, Any]) -> str | None:
    """Say which given names are no fields of connections; None if all are."""
    names = [name for name in given if name not in FIELDS]
    known = f"fields of connections are {', '.join(FIELDS)}"
    return f"{known} (got {', '.join(names)}); hc_mult is the number of streams" if names else None


def unread_field(given: Mapping[str, Any]) -> str | None:
    """Say which given field has no effect on a conversion; None if all have an effect."""
    config = complete(given)
    connection, start = config["connection"], config["hc_start"]
    for field in KIND_FIELDS if connection in ACCEPTED else ():
        default, is_of_readout = FIELDS[field], field == "hc_eps" and config["hc_readout"] == "learned"
        if config[field] != default and field not in ACCEPTED[connection].reads and not is_of_readout:
            because = f"{connection!r} doesn't read it"
            return _must_be(config, field, f"{default!r} with connection {connection!r}", because)
    if config["hc_history"] != FIELDS["hc_history"] and start != "history":
        return _must_be(
            config, "hc_history", f"{FIELDS['hc_history']!r} with hc_start {start!r}", "it starts from none"
        )
    for field in ("norm_alpha_attention", "norm_alpha_other"):
        if config["norm"] is None and config[field] is not None:
            return _must_be(config, field, "None with norm None", because="no norm is replaced")
    return None


def one_of(values: Iterable[object]) -> str:
    """List values for people."""
    *first, last = map(repr, values)
    return f"{', '.join(first)} or {last}" if first else last


def _not_converted(config: Mapping[str, Any]) -> tuple[str, str]:
    """Find the field that excludes an equal base, and its value; both empty without one."""
    read = ACCEPTED.get(config["connection"], Accepted()).reads
    for field, value in NOT_CONVERTED:
        if config[field] == value and (field not in KIND_FIELDS or field in read):
            return field, value
    return "", ""


def _must_be(config: Mapping[str, Any], name: str, accepted: str, because: str | None = None) -> str:
    return f"{name} must be {accepted} (got {config[name]!r:.20}){f': {because}' if because else ''}"
