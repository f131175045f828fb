"""The tensors a conversion adds, at the equivalent initialisation."""

from collections.abc import Iterator

import numpy as np

from hf_hyperconn.families import Family, usual_names
from hf_hyperconn.kinds import kind_of, parts, readout_of, sub_layers
from hf_hyperconn.models.sub_layers import place_of


def hyper_connection_tensors(config: dict, family: Family, stack: str) -> dict[str, np.ndarray]:
    """Every hyper-connection tensor by its name in the checkpoint, float32.

    config: of the hyper-connection model, as in its config.json.
    stack: what comes before the index of a layer in the names of the checkpoint's tensors, as `model.layers.`
    """
    config, tensors = usual_names(config), {}
    for k in range(sub_layers(config)):
        for parameter, value in kind_of(config).values(config, family.norm, k).items():
            tensors[f"{connection_name(config, stack, k)}.{parameter}"] = value
    for parameter, value in readout_of(config).values(config, family.norm).items():
        tensors[f"{readout_name(config, stack)}.{parameter}"] = value
    return tensors


def hyper_connection_shapes(config: dict, family: Family, stack: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each of these tensors, one after the other: a config may speak of more than there are."""
    config = usual_names(config)
    for k in range(sub_layers(config)):
        for parameter, shape in kind_of(config).shapes(config, family.norm).items():
            yield f"{connection_name(config, stack, k)}.{parameter}", shape
    for parameter, shape in readout_of(config).shapes(config, family.norm).items():
        yield f"{readout_name(config, stack)}.{parameter}", shape


def connection_name(config: dict, stack: str, k: int) -> str:
    """What the names of the tensors around sub-layer k begin with."""
    layer, sub_layer = place_of(k, parts(config))
    return f"{stack}{layer}.{sub_layer.connection}"


def readout_name(config: dict, stack: str) -> str:
    """What the names of the readout's tensors begin with."""
    return f"{stack}{config['num_hidden_layers'] - 1}.hc_head"
