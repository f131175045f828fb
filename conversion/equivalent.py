"""The tensors a conversion adds, at the equivalent initialisation."""

from collections.abc import Iterator

import numpy as np

from hf_hyperconn.families import Family
from hf_hyperconn.kinds import kind_of, readout_of, sub_layers
from hf_hyperconn.models.sub_layers import place_of


def hyper_connection_tensors(config: dict, family: Family, prefix: str) -> dict[str, np.ndarray]:
    """Every hyper-connection tensor by its name in the checkpoint, float32.

    config: of the hyper-connection model, as in its config.json.
    prefix: what comes before `layers.0` in the names of the checkpoint's tensors.
    """
    tensors = {}
    for k in range(sub_layers(config)):
        for parameter, value in kind_of(config).values(config, family.norm, k).items():
            tensors[f"{connection_name(prefix, k)}.{parameter}"] = value
    for parameter, value in readout_of(config).values(config, family.norm).items():
        tensors[f"{readout_name(config, prefix)}.{parameter}"] = value
    return tensors


def hyper_connection_shapes(config: dict, family: Family, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of each of these tensors, one after the other: a config may speak of more than there are."""
    for k in range(sub_layers(config)):
        for parameter, shape in kind_of(config).shapes(config, family.norm).items():
            yield f"{connection_name(prefix, k)}.{parameter}", shape
    for parameter, shape in readout_of(config).shapes(config, family.norm).items():
        yield f"{readout_name(config, prefix)}.{parameter}", shape


def connection_name(prefix: str, k: int) -> str:
    """What the names of the tensors around sub-layer k begin with."""
    layer, sub_layer = place_of(k)
    return f"{prefix}layers.{layer}.{sub_layer.connection}"


def readout_name(config: dict, prefix: str) -> str:
    """What the names of the readout's tensors begin with."""
    return f"{prefix}layers.{config['num_hidden_layers'] - 1}.hc_head"
