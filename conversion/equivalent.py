"""The tensors a conversion adds, at the equivalent initialisation."""

import torch

from hf_hyperconn.families import Family
from hf_hyperconn.models.hyper_connections import HyperConnection


def hyper_connection_tensors(config: dict, family: Family, prefix: str) -> dict[str, torch.Tensor]:
    """Every hyper-connection tensor by its name in the checkpoint, float32, as `_init_weights` would set it.

    config: of the hyper-connection model, as in its config.json.
    prefix: what comes before `layers.0` in the names of the checkpoint's tensors.
    """
    size, dynamic = config["hidden_size"], config["connection"] == "dhc"
    tensors = {}
    for sub_layer in range(2 * config["num_hidden_layers"]):
        name = f"{prefix}layers.{sub_layer // 2}.{('attn_hc', 'mlp_hc')[sub_layer % 2]}"
        connection = HyperConnection(size, config["hc_mult"], sub_layer, norm=torch.nn.Identity() if dynamic else None)
        tensors.update({f"{name}.{key}": value for key, value in connection.initial_values().items()})
        if dynamic:
            for key in family.norm_parameters:
                fill = torch.ones if key == "weight" else torch.zeros
                tensors[f"{name}.norm.{key}"] = fill(size, dtype=torch.float32)
    return tensors
