"""What may be asked of a conversion."""

from dataclasses import dataclass
from typing import Any

from hf_hyperconn.errors import ConversionError
from hf_hyperconn.kinds import CONVERTIBLE, FIELDS, KINDS

STARTS = ("copies", "history")


@dataclass(frozen=True)
class HyperConnectionFields:
    """What a conversion lets choose of `HyperConnectionConfig`; the readout is the one that keeps it exact.

    hc_mult: None for as many streams as the connection has where none are asked for.

    Raises `ConversionError` for a value that is not accepted.
    """

    hc_mult: int | None = None
    connection: str = "dhc"
    hc_tanh: bool = True
    hc_start: str = "copies"
    hc_history: str = "type"
    hc_block: int = 1

    def __post_init__(self):
        kind = KINDS.get(self.connection)
        if kind is None:
            raise ConversionError(
                f"connection {self.connection!r} was asked for; accepted are {', '.join(map(repr, CONVERTIBLE))}."
            )
        if self.hc_mult is None:
            object.__setattr__(self, "hc_mult", kind.default_streams)
        if kind.no_equivalent:
            raise ConversionError(
                f"{kind.no_equivalent}, so no pretrained model computes the same. Train from scratch, with "
                f"connection={kind.name!r} and hc_mult={kind.default_streams} in the config."
            )
        n: Any = self.hc_mult
        if n < 1:
            raise ConversionError(f"{n} residual streams were asked for; give -n 1 or more.")
        if n < kind.least:
            raise ConversionError(
                f"{kind.name} needs at least {kind.least} residual streams; give -n {kind.least} or more."
            )
        if kind.most is not None and n > kind.most:
            raise ConversionError(f"{kind.name} has no {n} streams; give -n {kind.most}, or none.")
        if self.hc_start not in STARTS:
            raise ConversionError(
                f"start {self.hc_start!r} was asked for; a conversion takes {' or '.join(map(repr, STARTS))}."
            )
        if self.hc_start == "history" and kind.no_history:
            raise ConversionError(f"{kind.name} can't start from the history: {kind.no_history}. Use shc or dhc.")
        for name, option in (("hc_history", "history"), ("hc_block", "block")):
            if getattr(self, name) != FIELDS[name] and name not in kind.fields:
                raise ConversionError(
                    f"{option} {getattr(self, name)!r} was asked for, which {kind.name} doesn't have; leave it out."
                )
        if self.hc_history != FIELDS["hc_history"] and self.hc_start != "history":
            raise ConversionError(f"history {self.hc_history!r} was asked for, but not the start 'history' itself.")
        if found := kind.fault({**self.as_config(), "hidden_size": self.hc_mult}):
            raise ConversionError(f"{found} was asked for.")

    def __str__(self) -> str:
        return ", ".join([self.connection, *KINDS[self.connection].settings(self.as_config())])

    def as_config(self) -> dict:
        """These and all other fields of `HyperConnectionConfig`."""
        return {**FIELDS, **vars(self), "hc_readout": "weighted" if self.hc_start == "history" else "mean"}
