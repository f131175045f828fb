"""How streams become one before the final norm."""

import math

import numpy as np

from .kind import NORM, SCALE, Readout, float32, setting


class Mean(Readout):
    """The mean of the streams, or their sum."""

    def flops(self, config):
        return config["hc_mult"] * config["hidden_size"]


class Joined(Readout):
    """Parts, or one stream, as they are."""

    def flops(self, config):
        return 0


class Weighted(Readout):
    """`WeightedReadout`."""

    def shapes(self, config, norm):
        return {"static_gamma": (config["hc_mult"],)}

    def values(self, config, norm):
        n = config["hc_mult"]
        is_history = setting(config, "hc_start") == "history"
        return float32(static_gamma=np.eye(n)[0] if is_history else np.full(n, 1 / n))

    def flops(self, config):
        return 2 * config["hc_mult"] * config["hidden_size"]


class Learned(Readout):
    """`LearnedReadout`."""

    def shapes(self, config, norm):
        n = config["hc_mult"]
        return {"hc_fn": (n, n * config["hidden_size"]), "hc_base": (n,), "hc_scale": (1,)}

    def values(self, config, norm):
        shapes, weight = self.shapes(config, norm), 1 / config["hc_mult"] - setting(config, "hc_eps")
        base = np.full(shapes["hc_base"], math.log(weight / (1 - weight)))
        return float32(hc_fn=np.zeros(shapes["hc_fn"]), hc_base=base, hc_scale=np.full(1, SCALE))

    def flops(self, config):
        n, d = config["hc_mult"], config["hidden_size"]
        return 2 * n * n * d + (NORM - 1) * n * d + 2 * n * d


READOUTS: dict[str, Readout] = {"mean": Mean(), "sum": Mean(), "learned": Learned(), "weighted": Weighted()}
