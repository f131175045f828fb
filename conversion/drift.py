"""How far stored connections are from the equivalent initialisation."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hf_hyperconn.analysis.costs import connection_parameters
from hf_hyperconn.families import Family

from .checkpoint import Weights
from .equivalent import FAVOURED_READ, connection_name, initial_values
from .source import CONFIG


@dataclass(frozen=True)
class Drift:
    """That of the connection around one sub-layer.

    layer: of the decoder, from zero. sub_layer: "attention" or "mlp".
    alpha: the largest change of a static weight that reads or mixes streams; of its logit, for mHC and iHC.
    beta: the same of the weights that write.
    dynamic: the standard deviation of what a token's own streams add to a coefficient, of the coefficient where it is
        largest, for streams of independent values of mean square 1; 0 when nothing is predicted, as at the start.
    """

    layer: int
    sub_layer: str
    alpha: float
    beta: float
    dynamic: float


def fault(weights: Weights, config: dict, family: Family) -> str | None:
    """What is wrong with the connections of a checkpoint, by the headers of its weights."""
    n, eps = config["hc_mult"], config.get("hc_eps")
    if config["connection"] in ("mhc", "ihc") and not (
        isinstance(eps, int | float) and 0 <= eps < (1 - FAVOURED_READ) / (n - 1)
    ):
        return f"hc_eps is {eps!r:.20} in {CONFIG}, with which no coefficients stand for residual connections"
    each = connection_parameters(config, len(family.norm)) // (2 * config["num_hidden_layers"])
    if 4 * each > weights.nbytes:
        return f"all weights together are smaller than one connection of the sizes in {CONFIG}"
    for k in range(2 * config["num_hidden_layers"]):
        for parameter, value in initial_values(config, family, k).items():
            name = f"{connection_name(weights.prefix or '', k)}.{parameter}"
            stored = weights.tensors.get(name)
            if stored is None:
                return f"the tensor {name} is missing"
            if (stored.dtype, stored.shape) != ("F32", value.shape):
                return f"{name} is {stored.dtype} {list(stored.shape)}, not F32 {list(value.shape)}"
    return None


def measure_drift(
    read: Callable[[str], np.ndarray], config: dict, family: Family, prefix: str
) -> tuple[bool, tuple[Drift, ...]]:
    """Whether any value of the connections differs from the equivalent initialisation, and how far each has come.

    read: gives a stored tensor by its name, in float32.
    config: of the hyper-connection model. prefix: as for `hyper_connection_tensors`.
    """
    has_changed, drifts = False, []
    for k in range(2 * config["num_hidden_layers"]):
        initial = initial_values(config, family, k)
        stored = {name: read(f"{connection_name(prefix, k)}.{name}") for name in initial}
        has_changed = has_changed or not all(np.array_equal(stored[name], initial[name]) for name in initial)
        parts = _manifold(stored, initial, config) if "base" in initial else _hyper(stored, initial, config)
        drifts.append(Drift(k // 2, ("attention", "mlp")[k % 2], *map(float, parts)))
    return has_changed, tuple(drifts)


def _hyper(stored: dict, initial: dict, config: dict) -> tuple[float, float, float]:
    dynamic = 0.0
    if "dynamic_alpha_fn" in stored:
        fn = np.column_stack([stored["dynamic_alpha_fn"], stored["dynamic_beta_fn"]])
        if "norm.weight" in stored:
            fn = fn * (1 + stored["norm.weight"] - initial["norm.weight"])[:, None]
        predicted = np.linalg.norm(fn, axis=0)
        if config.get("hc_tanh", True):
            predicted = np.tanh(predicted)
        columns = stored["dynamic_alpha_fn"].shape[1]
        scale = np.append(np.repeat(stored["dynamic_alpha_scale"], columns), stored["dynamic_beta_scale"])
        dynamic = np.abs(scale * predicted).max()
    return _largest(stored, initial, "static_alpha"), _largest(stored, initial, "static_beta"), dynamic


def _manifold(stored: dict, initial: dict, config: dict) -> tuple[float, float, float]:
    n, change = config["hc_mult"], np.abs(stored["base"] - initial["base"])
    scale = np.repeat(stored["scale"], [n, n, n * n][: len(stored["scale"])])
    dynamic = np.abs(scale * np.linalg.norm(stored["fn"], axis=1)).max()
    return np.delete(change, np.s_[n : 2 * n]).max(), change[n : 2 * n].max(), dynamic


def _largest(stored: dict, initial: dict, name: str) -> float:
    return np.abs(stored[name] - initial[name]).max()
