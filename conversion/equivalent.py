"""The tensors a conversion adds, at the equivalent initialisation.

Stated in numpy, apart from the module it initialises: a conversion need not import torch, and a verification does not
ask the code it checks.
"""

import numpy as np

from hf_hyperconn.families import Family


def hyper_connection_tensors(config: dict, family: Family, prefix: str) -> dict[str, np.ndarray]:
    """Every hyper-connection tensor by its name in the checkpoint, float32 (Eq. 14, Algorithm 2).

    config: of the hyper-connection model, as in its config.json.
    prefix: what comes before `layers.0` in the names of the checkpoint's tensors.
    """
    n, size = config["hc_mult"], config["hidden_size"]
    tensors = {}
    for k in range(2 * config["num_hidden_layers"]):
        name = f"{prefix}layers.{k // 2}.{('attn_hc', 'mlp_hc')[k % 2]}"
        identity = np.eye(n, dtype=np.float32)
        tensors[f"{name}.static_alpha"] = np.concatenate([identity[:, [k % n]], identity], axis=1)
        tensors[f"{name}.static_beta"] = np.ones(n, np.float32)
        if config["connection"] == "dhc":
            tensors[f"{name}.dynamic_alpha_fn"] = np.zeros((size, n + 1), np.float32)
            tensors[f"{name}.dynamic_beta_fn"] = np.zeros(size, np.float32)
            tensors[f"{name}.dynamic_alpha_scale"] = np.full(1, 0.01, np.float32)
            tensors[f"{name}.dynamic_beta_scale"] = np.full(1, 0.01, np.float32)
            for parameter, value in family.norm.items():
                tensors[f"{name}.norm.{parameter}"] = np.full(size, value, np.float32)
    return tensors
