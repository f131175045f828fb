"""The table of connections: of each kind its parameters and their start, cost, limits, exactness, title and paper.

It imports neither torch nor transformers. Values are stated in numpy, apart from the modules that they initialise: a
conversion need not import torch, and a verification does not ask the code it checks.
"""

from collections.abc import Mapping

from ..models.connection_fields import FIELDS, FORMAT, convertible
from .attention import AttentionResidual
from .from_scratch import Dual, Keel
from .hyper import AltUp, Dynamic, Frac, Static
from .kind import READOUTS, Kind, Readout, parts, setting, sub_layers
from .manifold import Identity, Manifold

KINDS = {
    kind.name: kind
    for kind in (
        *(Static(), Dynamic(), Manifold(), Identity(), Frac()),
        *(AttentionResidual(), AltUp(), Keel(), Dual()),
    )
}
CONVERTIBLE = convertible("connection")

__all__ = [
    "CONVERTIBLE",
    "FIELDS",
    "FORMAT",
    "KINDS",
    "READOUTS",
    "Kind",
    "Readout",
    "setting",
    "kind_of",
    "readout_of",
    "parts",
    "sub_layers",
]


def kind_of(config: Mapping) -> Kind:
    """The kind of a config's connections. Raises `KeyError` for a name that is in no row."""
    return KINDS[setting(config, "connection")]


def readout_of(config: Mapping) -> Readout:
    """The readout of a config. Raises `KeyError` for a name that is in no row."""
    return kind_of(config).readout or READOUTS[setting(config, "hc_readout")]
