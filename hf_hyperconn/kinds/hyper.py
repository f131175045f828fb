"""Kinds whose matrices read and mix streams: hyper-connections, frac-connections, AltUp, mHC and iHC."""

import math
from collections.abc import Iterable, Mapping

import numpy as np

from ..models.connection_fields import FAVOURED_READ, KEPT_SHARE
from ..models.sub_layers import written_streams
from .kind import (
    NORM,
    SCALE,
    Joined,
    Kind,
    Shapes,
    Values,
    count_sub_layers,
    field_value,
    float32,
    largest_change,
    sub_layers_of,
)


class Static(Kind):
    """Row of `HyperConnection` without a norm."""

    name, title, paper = "shc", "static hyper-connections", "2409.19606"

    def shapes(self, config, norm):
        n = config["hc_mult"]
        return {"static_alpha": (n, n + 1), "static_beta": (n,)}

    def values(self, config, norm, k):
        n = config["hc_mult"]
        read, write = k % n, np.ones(n)
        if field_value(config, "hc_start") == "history":
            read, write = 0, np.zeros(n)
            history = field_value(config, "hc_history")
            write[list(written_streams(k, count_sub_layers(config), n, history, len(sub_layers_of(config))))] = 1
        identity = np.eye(n)
        return float32(static_alpha=np.concatenate([identity[:, [read]], identity], axis=1), static_beta=write)

    def drift(self, stored, initial, config):
        return (*(largest_change(stored, initial, name) for name in ("static_alpha", "static_beta")), 0.0)

    def flops(self, config):
        # to read, mix and write (HC paper, Eqs. 2-5)
        return count_sub_layers(config) * 2 * config["hc_mult"] * (config["hc_mult"] + 2) * config["hidden_size"]

    def kept_for_backward(self, config):
        # the streams that a layer receives and the outputs of its branches; the first copies are one embedding
        n = config["hc_mult"]
        return config["num_hidden_layers"] * (n + len(sub_layers_of(config))) - (n - 1), 0


class Dynamic(Static):
    """Row of `HyperConnection` with a norm."""

    name, title = "dhc", "dynamic hyper-connections"

    def shapes(self, config, norm):
        return {**super().shapes(config, norm), **_prediction(config["hidden_size"], config["hc_mult"] + 1, norm)}

    def values(self, config, norm, k):
        return {**super().values(config, norm, k), **_nothing_predicted(self.shapes(config, norm), norm)}

    def drift(self, stored, initial, config):
        alpha, beta, _ = super().drift(stored, initial, config)
        return alpha, beta, _predicted(stored, initial, config)

    def flops(self, config):
        # to predict the coefficients takes as much as to use them, and a norm (Eqs. 10-13)
        normed = count_sub_layers(config) * NORM * config["hc_mult"] * config["hidden_size"]
        return 2 * super().flops(config) + normed

    def kept_for_backward(self, config):
        # coefficients, their prediction, the norm's divisors
        n, (rows, _) = config["hc_mult"], super().kept_for_backward(config)
        return rows, count_sub_layers(config) * (2 * n * (n + 2) + n)


class Frac(Dynamic):
    """`FracConnection`."""

    name, title, paper = "frac", "frac-connections", "2503.14125"
    readout = Joined()

    def streams(self, config):
        return f"the hidden state in {config['hc_mult']} parts"

    def between_layers(self, config):
        return None

    def rows_between_layers(self, config):
        return 1

    def shapes(self, config, norm):
        n = config["hc_mult"]
        static = {"static_alpha": (n, 2 * n), "static_beta": (n,)}
        return {**static, **_prediction(config["hidden_size"] // n, 2 * n, norm)}

    def values(self, config, norm, k):
        identity = np.eye(config["hc_mult"])
        static = float32(static_alpha=np.concatenate([identity, identity], axis=1), static_beta=np.ones(len(identity)))
        return {**static, **_nothing_predicted(self.shapes(config, norm), norm)}

    def flops(self, config):
        return count_sub_layers(config) * (4 * (2 * config["hc_mult"] + 1) + NORM) * config["hidden_size"]

    def kept_for_backward(self, config):
        # differentiated by autograd, in float32
        n, d = config["hc_mult"], config["hidden_size"]
        return 0, count_sub_layers(config) * (5 * d + 2 * n * (2 * n + 1) + n)


class AltUp(Static):
    """`AltUpConnection`."""

    name, title, paper = "altup", "AltUp", "2301.13310"
    extends_hyper_connections = False

    def shapes(self, config, norm):
        n = config["hc_mult"]
        return {"prediction": (n, n), "correction": (n,)}

    def values(self, config, norm, k):
        return float32(prediction=np.eye(config["hc_mult"]), correction=np.ones(config["hc_mult"]))

    def drift(self, stored, initial, config):
        return (*(largest_change(stored, initial, name) for name in ("prediction", "correction")), 0.0)


class Manifold(Kind):
    """`ManifoldHyperConnection`."""

    name, title, paper = "mhc", "manifold-constrained hyper-connections", "2512.24880"
    is_rounded = True
    groups = 3  # of coefficients: reads, writes, mixes

    def shapes(self, config, norm):
        rows = sum(self._rows(config))
        return {"fn": (rows, config["hc_mult"] * config["hidden_size"]), "base": (rows,), "scale": (self.groups,)}

    def values(self, config, norm, k):
        """Return reads that sum to 1, writes of 1, and a mix whose rows sum to 1."""
        n, eps, shapes = config["hc_mult"], field_value(config, "hc_eps"), self.shapes(config, norm)
        reads = np.full(n, (1 - FAVOURED_READ) / (n - 1))
        reads[k % n] = FAVOURED_READ
        logits = [math.log((read - eps) / (1 - (read - eps))) for read in reads]
        mix = np.where(np.eye(n) > 0, math.log(KEPT_SHARE), math.log((1 - KEPT_SHARE) / (n - 1)))
        base = np.concatenate([logits, np.zeros(n), mix.ravel()])[: shapes["base"][0]]
        return float32(fn=np.zeros(shapes["fn"]), base=base, scale=np.full(self.groups, SCALE))

    def drift(self, stored, initial, config):
        n, change = config["hc_mult"], np.abs(stored["base"] - initial["base"])
        scale = np.repeat(stored["scale"], self._rows(config))
        dynamic = np.abs(scale * np.linalg.norm(stored["fn"], axis=1)).max()
        return np.delete(change, np.s_[n : 2 * n]).max(), change[n : 2 * n].max(), dynamic

    def flops(self, config):
        n, d = config["hc_mult"], config["hidden_size"]
        moved = 2 * n * (n + 2) * d if self.groups == 3 else 4 * n * d
        # predicted from all streams at once (mHC paper, Eq. 7)
        return count_sub_layers(config) * (moved + 2 * sum(self._rows(config)) * n * d + (NORM - 1) * n * d)

    def kept_for_backward(self, config):
        # the streams and the output of every sub-layer; reads, writes, mixes, their prediction, the norm's divisor
        n, k = config["hc_mult"], count_sub_layers(config)
        return k * (n + 1) - (n - 1), k * (2 * sum(self._rows(config)) + 1)

    def _rows(self, config: Mapping) -> list[int]:
        """Count the coefficients of each group."""
        n = config["hc_mult"]
        return [n, n, n * n][: self.groups]


class Identity(Manifold):
    """`ManifoldHyperConnection` that does not mix."""

    name, title = "ihc", "manifold-constrained hyper-connections with unmixed streams"
    groups = 2


def _prediction(size: int, columns: int, norm: Iterable[str]) -> Shapes:
    """Return the shapes of the prediction of coefficients from streams of `size` values (HC paper, Algorithm 2)."""
    return {
        "dynamic_alpha_fn": (size, columns),
        "dynamic_beta_fn": (size,),
        "dynamic_alpha_scale": (1,),
        "dynamic_beta_scale": (1,),
        **{f"norm.{name}": (size,) for name in norm},
    }


def _nothing_predicted(shapes: Shapes, norm: Mapping[str, float]) -> Values:
    """Return the start of the predicting parameters, which changes no coefficient."""
    start = {f"norm.{name}": value for name, value in norm.items()}
    start |= dict.fromkeys(("dynamic_alpha_scale", "dynamic_beta_scale"), SCALE)
    return {
        name: np.full(shape, start.get(name, 0.0), np.float32)
        for name, shape in shapes.items()
        if not name.startswith("static_")
    }


def _predicted(stored: Values, initial: Values, config: Mapping) -> float:
    """Return the largest standard deviation of the dynamic part of a coefficient."""
    fn = np.column_stack([stored["dynamic_alpha_fn"], stored["dynamic_beta_fn"]])
    if "norm.weight" in stored:
        fn = fn * (1 + stored["norm.weight"] - initial["norm.weight"])[:, None]
    predicted = np.linalg.norm(fn, axis=0)
    if field_value(config, "hc_tanh"):
        predicted = np.tanh(predicted)
    columns = stored["dynamic_alpha_fn"].shape[1]
    scale = np.append(np.repeat(stored["dynamic_alpha_scale"], columns), stored["dynamic_beta_scale"])
    return float(np.abs(scale * predicted).max())
