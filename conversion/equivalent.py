"""The tensors a conversion adds, at the equivalent initialisation."""

from collections.abc import Iterator, Sequence

import numpy as np

from hf_hyperconn.families import Family, configs_of_stacks
from hf_hyperconn.kinds import kind_of, parts, readout_of, sub_layers
from hf_hyperconn.models.sub_layers import place_of


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
