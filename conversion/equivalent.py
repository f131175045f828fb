"""The tensors a conversion adds, at the equivalent initialisation.

Stated in numpy, apart from the module it initialises: a conversion need not import torch, and a verification does not
ask the code it checks.
"""

import math

import numpy as np

from hf_hyperconn.families import Family

FAVOURED_READ, KEPT = 0.7, 0.96


def hyper_connection_tensors(config: dict, family: Family, prefix: str) -> dict[str, np.ndarray]:
    """Every hyper-connection tensor by its name in the checkpoint, float32.

    config: of the hyper-connection model, as in its config.json.
    prefix: what comes before `layers.0` in the names of the checkpoint's tensors.
    """
    tensors = {}
    for k in range(2 * config["num_hidden_layers"]):
        for parameter, value in initial_values(config, family, k).items():
            tensors[f"{connection_name(prefix, k)}.{parameter}"] = value
    return tensors


def connection_name(prefix: str, k: int) -> str:
    """What the names of the tensors around sub-layer k begin with."""
    return f"{prefix}layers.{k // 2}.{('attn_hc', 'mlp_hc')[k % 2]}"


def initial_values(config: dict, family: Family, k: int) -> dict[str, np.ndarray]:
    """The tensors around sub-layer k, float32, by their names in the connection."""
    return {name: np.asarray(value, np.float32) for name, value in _values(config, family, k).items()}


def _values(config: dict, family: Family, k: int) -> dict[str, np.ndarray]:
    """The parameters around sub-layer k."""
    n, size, identity = config["hc_mult"], config["hidden_size"], np.eye(config["hc_mult"])
    match config["connection"]:
        case "shc":
            return _static(identity[:, [k % n]], identity)
        case "dhc":
            return {**_static(identity[:, [k % n]], identity), **_dynamic(size, n + 1, family)}
        case "frac":
            return {**_static(identity, identity), **_dynamic(size // n, 2 * n, family)}
        case "mhc":
            return _manifold(config, k, [np.where(identity > 0, math.log(KEPT), math.log((1 - KEPT) / (n - 1)))])
        case "ihc":
            return _manifold(config, k, [])


def _static(read: np.ndarray, mix: np.ndarray) -> dict[str, np.ndarray]:
    """Eq. 14: writes of 1."""
    return {"static_alpha": np.concatenate([read, mix], axis=1), "static_beta": np.ones(len(mix))}


def _dynamic(size: int, columns: int, family: Family) -> dict[str, np.ndarray]:
    """Algorithm 2: nothing is predicted yet."""
    return {
        "dynamic_alpha_fn": np.zeros((size, columns)),
        "dynamic_beta_fn": np.zeros(size),
        "dynamic_alpha_scale": np.full(1, 0.01),
        "dynamic_beta_scale": np.full(1, 0.01),
        **{f"norm.{name}": np.full(size, value) for name, value in family.norm.items()},
    }


def _manifold(config: dict, k: int, mix: list[np.ndarray]) -> dict[str, np.ndarray]:
    """Reads that sum to 1, writes of 1, and a mix whose rows sum to 1."""
    n, eps = config["hc_mult"], config["hc_eps"]
    reads = np.full(n, (1 - FAVOURED_READ) / (n - 1))
    reads[k % n] = FAVOURED_READ
    logits = [math.log((read - eps) / (1 - (read - eps))) for read in reads]
    base = np.concatenate([logits, np.zeros(n), *(block.ravel() for block in mix)])
    fn = np.zeros((len(base), n * config["hidden_size"]))
    return {"fn": fn, "base": base, "scale": np.full(2 + len(mix), 0.01)}
