"""How far stored connections are from the equivalent initialisation."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from hf_hyperconn.analysis.costs import connection_parameters
from hf_hyperconn.families.family import Family, configs_of_stacks
from hf_hyperconn.kinds import kind_of, parts, place_of, readout_of, sub_layers
from hf_hyperconn.models.connection_fields import fault_of_start

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.source import CONFIG


@dataclass(frozen=True)
class Drift:
    """That of the connection around one sub-layer.

    stack: "encoder" or "decoder" of an encoder-decoder; "" of another model.
    layer: from zero. sub_layer: "attention", "mlp", or what else it is called.
    alpha: the largest change of a static weight that reads or mixes streams; of its logit, for mHC and iHC.
    beta: the same of the weights that write.
    dynamic: the standard deviation of what a token's own streams add to a coefficient, of the coefficient where it is
        largest, for streams of independent values of mean square 1; 0 when nothing is predicted, as at the start. For
        attention residuals that of a value's score.
    """

    stack: str
    layer: int
    sub_layer: str
    alpha: float
    beta: float
    dynamic: float


def fault(checkpoint: Checkpoint) -> str | None:
    """What is wrong with the connections of a checkpoint, by the headers of its weights."""
    config, family, weights = checkpoint.config, checkpoint.family, checkpoint.weights
    if found := fault_of_start(config):
        return f"in {CONFIG}, {found}"
    each = connection_parameters(config, family.norm) // sum(map(sub_layers, configs_of_stacks(config)))
    if 4 * each > weights.nbytes:
        return f"all weights together are smaller than one connection of the sizes in {CONFIG}"
    for name, shape in hyper_connection_shapes(config, family, checkpoint.stacks):
        stored = weights.tensors.get(name)
        if stored is None:
            return f"the tensor {name} is missing"
        if (stored.dtype, stored.shape) != ("F32", shape):
            return f"{name} is {stored.dtype} {list(stored.shape)}, not F32 {list(shape)}"
    return None


def measure_drift(
    read: Callable[[str], np.ndarray], checkpoint: Checkpoint
) -> tuple[bool, tuple[Drift, ...], float | None]:
    """Whether any value of the connections differs from the equivalent initialisation, and how far each has come.

    read: gives a stored tensor by its name, in float32.

    The last is the largest change of a parameter of the readout; None when it has none.
    """
    has_changed, drifts, changes = False, [], []
    for each, of_stack, stack in stacks_of(checkpoint.config, checkpoint.family, checkpoint.stacks):
        kind = kind_of(each)
        for k in range(sub_layers(each)):
            initial = kind.values(each, of_stack.norm, k)
            stored = {name: read(f"{connection_name(each, stack, k)}.{name}") for name in initial}
            has_changed = has_changed or not all(np.array_equal(stored[name], initial[name]) for name in initial)
            layer, sub_layer = place_of(k, parts(each))
            drifts.append(Drift(of_stack.place, layer, sub_layer.name, *map(float, kind.drift(stored, initial, each))))
        initial = readout_of(each).values(each, of_stack.norm)
        changes += [np.abs(read(f"{readout_name(each, stack)}.{name}") - initial[name]).max() for name in initial]
    of_readout = float(max(changes)) if changes else None
    return has_changed or bool(of_readout), tuple(drifts), of_readout


def stacks_of(config: dict, family: Family, stacks: Sequence[str]) -> Iterator[tuple[dict, Family, str]]:
    """For each list of layers its config, its family, and what the names of its tensors begin with.

    config: of the hyper-connection model, as in its config.json.
    stacks: what comes before the index of a layer in the names of the checkpoint's tensors, as `model.layers.`, for
        each list of layers.
    """
    return zip(configs_of_stacks(config), family.stacks, stacks, strict=True)


def hyper_connection_tensors(config: dict, family: Family, stacks: Sequence[str]) -> dict[str, np.ndarray]:
    """Every hyper-connection tensor by its name in the checkpoint, float32. Its arguments are those of `stacks_of`."""
    tensors = {}
    for each, of_stack, stack in stacks_of(config, family, stacks):
        for k in range(sub_layers(each)):
            for parameter, value in kind_of(each).values(each, of_stack.norm, k).items():
                tensors[f"{connection_name(each, stack, k)}.{parameter}"] = value
        for parameter, value in readout_of(each).values(each, of_stack.norm).items():
            tensors[f"{readout_name(each, stack)}.{parameter}"] = value
    return tensors


def hyper_connection_shapes(
    config: dict, family: Family, stacks: Sequence[str]
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each of these tensors, one after the other: a config may speak of more than there are."""
    for each, of_stack, stack in stacks_of(config, family, stacks):
        for k in range(sub_layers(each)):
            for parameter, shape in kind_of(each).shapes(each, of_stack.norm).items():
                yield f"{connection_name(each, stack, k)}.{parameter}", shape
        for parameter, shape in readout_of(each).shapes(each, of_stack.norm).items():
            yield f"{readout_name(each, stack)}.{parameter}", shape


def connection_name(config: dict, stack: str, k: int) -> str:
    """What the names of the tensors around sub-layer k begin with."""
    layer, sub_layer = place_of(k, parts(config))
    return f"{stack}{layer}.{sub_layer.connection}"


def readout_name(config: dict, stack: str) -> str:
    """What the names of the readout's tensors begin with."""
    return f"{stack}{config['num_hidden_layers'] - 1}.hc_head"
