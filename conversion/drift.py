"""How far stored connections are from the equivalent initialisation."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hf_hyperconn.analysis.costs import connection_parameters
from hf_hyperconn.families import Family
from hf_hyperconn.kinds import kind_of, parts, readout_of, sub_layers
from hf_hyperconn.models.sub_layers import place_of

from .checkpoint import Weights
from .equivalent import connection_name, hyper_connection_shapes, readout_name
from .source import CONFIG


@dataclass(frozen=True)
class Drift:
    """That of the connection around one sub-layer.

    layer: of the decoder, from zero. sub_layer: "attention" or "mlp".
    alpha: the largest change of a static weight that reads or mixes streams; of its logit, for mHC and iHC.
    beta: the same of the weights that write.
    dynamic: the standard deviation of what a token's own streams add to a coefficient, of the coefficient where it is
        largest, for streams of independent values of mean square 1; 0 when nothing is predicted, as at the start. For
        attention residuals that of a value's score.
    """

    layer: int
    sub_layer: str
    alpha: float
    beta: float
    dynamic: float


def fault(weights: Weights, config: dict, family: Family) -> str | None:
    """What is wrong with the connections of a checkpoint, by the headers of its weights."""
    if found := kind_of(config).fault_of_start(config):
        return f"{CONFIG} has {found}"
    each = connection_parameters(config, family.norm) // sub_layers(config)
    if 4 * each > weights.nbytes:
        return f"all weights together are smaller than one connection of the sizes in {CONFIG}"
    for name, shape in hyper_connection_shapes(config, family, weights.stack or "layers."):
        stored = weights.tensors.get(name)
        if stored is None:
            return f"the tensor {name} is missing"
        if (stored.dtype, stored.shape) != ("F32", shape):
            return f"{name} is {stored.dtype} {list(stored.shape)}, not F32 {list(shape)}"
    return None


def measure_drift(
    read: Callable[[str], np.ndarray], config: dict, family: Family, stack: str
) -> tuple[bool, tuple[Drift, ...], float | None]:
    """Whether any value of the connections differs from the equivalent initialisation, and how far each has come.

    read: gives a stored tensor by its name, in float32.
    config: of the hyper-connection model. stack: as for `hyper_connection_tensors`.

    The last is the largest change of a parameter of the readout; None when it has none.
    """
    kind, has_changed, drifts = kind_of(config), False, []
    for k in range(sub_layers(config)):
        initial = kind.values(config, family.norm, k)
        stored = {name: read(f"{connection_name(config, stack, k)}.{name}") for name in initial}
        has_changed = has_changed or not all(np.array_equal(stored[name], initial[name]) for name in initial)
        changes = kind.drift(stored, initial, config)
        layer, sub_layer = place_of(k, parts(config))
        drifts.append(Drift(layer, sub_layer.name, *map(float, changes)))
    initial = readout_of(config).values(config, family.norm)
    of_parameters = [np.abs(read(f"{readout_name(config, stack)}.{name}") - initial[name]).max() for name in initial]
    of_readout = float(max(of_parameters)) if of_parameters else None
    return has_changed or bool(of_readout), tuple(drifts), of_readout
