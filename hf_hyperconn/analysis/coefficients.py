"""How the coefficients of a model are distributed over tokens."""

import torch

from ..observation import Observation
from .statistics import PERCENTILES, Sample

KINDS = ("read", "keep", "mix", "write")


class CoefficientMeter:
    """Percentiles of the coefficients, by sub-layer and kind.

    read: A_m. keep: the diagonal of A_r, a stream's weight in itself. mix: the rest of A_r. write: b.

    sub_layers: K.
    """

    def __init__(self, sub_layers: int):
        self.samples = {kind: [Sample() for _ in range(sub_layers)] for kind in KINDS}

    def see(self, seen: Observation) -> None:
        """Take in a sub-layer of a forward."""
        n, k = seen.beta.shape[-1], seen.place
        kept = torch.eye(n, dtype=torch.bool, device=seen.mixes.device).expand_as(seen.mixes)
        values = (seen.reads, seen.mixes[kept], seen.mixes[~kept], seen.beta)
        for kind, value in zip(KINDS, values, strict=True):
            self.samples[kind][k].add(value)

    def result(self) -> dict[str, torch.Tensor]:
        """`PERCENTILES` by kind, `[K, 5]`; there is no "mix" with one stream."""
        return {
            kind: torch.stack([sample.percentiles(PERCENTILES) for sample in samples])
            for kind, samples in self.samples.items()
            if all(len(sample.kept) for sample in samples)
        }
