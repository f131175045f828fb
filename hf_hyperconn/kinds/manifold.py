"""Manifold-constrained hyper-connections: mHC, and iHC, which leaves the streams unmixed."""

import math
from collections.abc import Mapping

import numpy as np

from ..models.connection_fields import FAVOURED_READ, KEPT
from .kind import NORM, SCALE, Kind, float32, setting, sub_layers


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
        n, eps, shapes = config["hc_mult"], setting(config, "hc_eps"), self.shapes(config, norm)
        reads = np.full(n, (1 - FAVOURED_READ) / (n - 1))
        reads[k % n] = FAVOURED_READ
        logits = [math.log((read - eps) / (1 - (read - eps))) for read in reads]
        mix = np.where(np.eye(n) > 0, math.log(KEPT), math.log((1 - KEPT) / (n - 1)))
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
        return sub_layers(config) * (moved + 2 * sum(self._rows(config)) * n * d + (NORM - 1) * n * d)

    def kept(self, config):
        # the streams and the output of every sub-layer; reads, writes, mixes, their prediction, the norm's divisor
        n, k = config["hc_mult"], sub_layers(config)
        return k * (n + 1) - (n - 1), k * (2 * sum(self._rows(config)) + 1)

    def _rows(self, config: Mapping) -> list[int]:
        """Count the coefficients of each group."""
        n = config["hc_mult"]
        return [n, n, n * n][: self.groups]


class Identity(Manifold):
    """`ManifoldHyperConnection` that does not mix."""

    name, title = "ihc", "manifold-constrained hyper-connections with unmixed streams"
    groups = 2
