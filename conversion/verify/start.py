"""The tensors of connections by name: their start, and the drift of stored ones."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np

from hf_hyperconn.analysis.costs import connection_parameters
from hf_hyperconn.families.family import Family, configs_of_stacks
from hf_hyperconn.kinds import count_sub_layers, kind_of, place_of, readout_of, sub_layers_of
from hf_hyperconn.models.connection_fields import fault_of_start

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.source import CONFIG


@dataclass(frozen=True)
class Drift:
    """The distance of the connection around one sub-layer from its start.

    stack: "encoder" or "decoder" of an encoder-decoder; "" of another model.
    layer: from zero. sub_layer: "attention", "mlp", or another name of the family.
    alpha: the largest change of a static weight that reads or mixes streams; of its logit, for mHC and iHC.
    beta: the same of the weights that write.
    dynamic: the largest standard deviation of the predicted part of a coefficient, for streams of independent values
        of mean square 1. It is 0 at the start, where nothing is predicted. For attention residuals it is the
        standard deviation of a value's score.
    """

    stack: str
    layer: int
    sub_layer: str
    alpha: float
    beta: float
    dynamic: float


@dataclass(frozen=True)
class _Module:
    """The connection around a sub-layer, or the readout of a list of layers.

    config, family: of the list.
    stack: the beginning of the names of its tensors, as `model.layers.`.
    k: the number of the sub-layer; None for the readout.
    """

    config: dict
    family: Family
    stack: str
    k: int | None

    def name(self, parameter: str) -> str:
        """Return the name of a tensor in the checkpoint."""
        if self.k is None:
            return f"{self.stack}{self.config['num_hidden_layers'] - 1}.hc_head.{parameter}"
        layer, sub_layer = place_of(self.k, sub_layers_of(self.config))
        return f"{self.stack}{layer}.{sub_layer.connection}.{parameter}"

    def shapes(self) -> dict[str, tuple[int, ...]]:
        if self.k is None:
            return readout_of(self.config).shapes(self.config, self.family.norm)
        kind = kind_of(self.config)
        return kind.shapes(self.config, self.family.norm) if kind.has_parameters(self.config, self.k) else {}

    def values(self) -> dict[str, np.ndarray]:
        """Return the parameters at the start, float32."""
        if self.k is None:
            return readout_of(self.config).values(self.config, self.family.norm)
        return kind_of(self.config).values(self.config, self.family.norm, self.k)


def _modules(config: dict, family: Family, stacks: Sequence[str]) -> Iterator[_Module]:
    for config_of_stack, family_of_stack, stack in zip(configs_of_stacks(config), family.stacks, stacks, strict=True):
        for k in chain(range(count_sub_layers(config_of_stack)), [None]):  # a config may name any number of layers
            yield _Module(config_of_stack, family_of_stack, stack, k)


def hyper_connection_tensors(config: dict, family: Family, stacks: Sequence[str]) -> dict[str, np.ndarray]:
    """Return every tensor of connections and readouts at the start, float32, by its name in the checkpoint.

    config: config.json of the hyper-connection model.
    stacks: the beginning of the names of the tensors in each list of layers, as `model.layers.`.
    """
    return {
        module.name(parameter): value
        for module in _modules(config, family, stacks)
        for parameter, value in module.values().items()
    }


def hyper_connection_shapes(
    config: dict, family: Family, stacks: Sequence[str]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Yield name and shape of each tensor of connections and readouts; arguments as for `hyper_connection_tensors`."""
    for module in _modules(config, family, stacks):
        for parameter, shape in module.shapes().items():
            yield module.name(parameter), shape


def fault_of_connections(checkpoint: Checkpoint) -> str | None:
    """Find a fault of the connections of a checkpoint, by the headers of its weights."""
    config, family, weights = checkpoint.config, checkpoint.family, checkpoint.weights
    if reason := fault_of_start(config):
        return f"in {CONFIG}, {reason}"
    parameters = connection_parameters(config, family.norm) // sum(map(count_sub_layers, configs_of_stacks(config)))
    if 4 * parameters > weights.nbytes:
        return f"all weights together are smaller than one connection of the sizes in {CONFIG}"
    for name, shape in hyper_connection_shapes(config, family, checkpoint.stack_prefixes):
        stored = weights.tensors.get(name)
        if stored is None:
            return f"the tensor {name} is missing"
        if (stored.dtype, stored.shape) != ("F32", shape):
            return f"{name} is {stored.dtype} {list(stored.shape)}, not F32 {list(shape)}"
    return None


def measure_drift(
    read: Callable[[str], np.ndarray], checkpoint: Checkpoint
) -> tuple[bool, tuple[Drift, ...], float | None]:
    """Measure the drift of each connection, and tell whether any value differs from its start.

    read: returns a stored tensor by its name, in float32.

    The last value is the largest change of a parameter of the readout; None for a readout without parameters.
    """
    has_changed, drifts, changes = False, [], []
    for module in _modules(checkpoint.config, checkpoint.family, checkpoint.stack_prefixes):
        initial = module.values()
        stored = {parameter: read(module.name(parameter)) for parameter in initial}
        has_changed = has_changed or not all(np.array_equal(stored[name], initial[name]) for name in initial)
        if module.k is None:
            changes += [np.abs(stored[name] - initial[name]).max() for name in initial]
        elif initial:
            layer, sub_layer = place_of(module.k, sub_layers_of(module.config))
            drift = kind_of(module.config).drift(stored, initial, module.config)
            drifts.append(Drift(module.family.place, layer, sub_layer.name, *map(float, drift)))
    return has_changed, tuple(drifts), float(max(changes)) if changes else None
