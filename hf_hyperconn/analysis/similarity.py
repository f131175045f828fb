"""How much a sub-layer's input changes from one sub-layer to the next (HC paper, Figure 3)."""

import torch
from torch.nn import functional as F

from ..observation import Observation
from .statistics import Sample

SHOWN = (5, 50, 95)


class LayerSimilarity:
    """Cosine similarity, token by token, between what a branch reads and what the branch before it read.

    sub_layers: K.
    """

    def __init__(self, sub_layers: int):
        self.samples = [Sample() for _ in range(sub_layers - 1)]
        self.before: torch.Tensor  # from sub-layer 0 on

    def see(self, seen: Observation) -> None:
        """Take in a sub-layer of a forward; they come in order."""
        k, read = seen.place, seen.branch_input.float()
        if k > 0:
            self.samples[k - 1].add(F.cosine_similarity(read, self.before.to(read.device), dim=-1))
        self.before = read

    def result(self) -> torch.Tensor:
        """5th percentile, median and 95th percentile between sub-layers k and k + 1, `[K - 1, 3]`."""
        found = torch.empty(len(self.samples), len(SHOWN), dtype=torch.float64)
        for row, sample in zip(found, self.samples, strict=True):
            row[:] = sample.percentiles(SHOWN)
        return found
