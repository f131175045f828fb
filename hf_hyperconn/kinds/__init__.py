"""The table of connections: parameters, start, cost, limits, exactness, title and paper of each kind.

It imports neither torch nor transformers. It states values in numpy, apart from the modules that they initialize. So a
conversion need not import torch, and a verification does not rely on the code that it checks.
"""

from collections.abc import Mapping
from importlib import import_module
from pkgutil import iter_modules

from ..models.connection_fields import CHOICES, FIELDS, FORMAT, convertible
from .kind import READOUTS, Kind, Readout, count_sub_layers, field_value, place_of, sub_layers_of

for module in iter_modules(__path__):  # the classes of all modules here are the rows
    import_module(f"{__name__}.{module.name}")
KINDS = {name: Kind.rows[name] for name in CHOICES["connection"]}
CONVERTIBLE = convertible("connection")

__all__ = [
    "CONVERTIBLE",
    "FIELDS",
    "FORMAT",
    "KINDS",
    "READOUTS",
    "Kind",
    "Readout",
    "field_value",
    "kind_of",
    "readout_of",
    "sub_layers_of",
    "place_of",
    "count_sub_layers",
]


def kind_of(config: Mapping) -> Kind:
    """Return the kind of a config's connections. Raises `KeyError` for an unknown name."""
    return KINDS[field_value(config, "connection")]


def readout_of(config: Mapping) -> Readout:
    """Return the readout of a config. Raises `KeyError` for an unknown name."""
    return kind_of(config).readout or READOUTS[field_value(config, "hc_readout")]
