"""Whether the streams differ, which of them are used, and what mixing does to their size."""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from ..observation import Observation
from .statistics import Moments


@dataclass(frozen=True)
class StreamStatistics:
    """Means over tokens, by sub-layer.

    similarity: cosine between pairs of streams, mean over pairs, `[K]`; 1 while all are equal, NaN for one stream.
    read_share: of each stream in the absolute weights that a branch reads with, `[K, N]`.
    write_share: of each stream in the absolute weights that a branch output is written with, `[K, N]`.
    gain: largest absolute row sum of the product of all A_r up to sub-layer k, `[K]`: how much mixing alone can make
        a stream grow (the forward gain of the mHC paper).
    """

    similarity: torch.Tensor
    read_share: torch.Tensor
    write_share: torch.Tensor
    gain: torch.Tensor


class StreamMeter:
    """Gathers `StreamStatistics` while a model runs.

    sub_layers: K.
    """

    def __init__(self, sub_layers: int):
        self.similarity, self.reads, self.writes, self.gains = (
            [Moments() for _ in range(sub_layers)] for _ in range(4)
        )
        self.product: torch.Tensor  # from sub-layer 0 on

    def see(self, seen: Observation) -> None:
        """Take in a sub-layer of a forward; they come in order."""
        k = seen.place
        mix = seen.mixes.transpose(-1, -2)
        self.product = mix if k == 0 else mix @ self.product.to(mix.device)
        self.similarity[k].add(pair_cosine(seen.streams).flatten())
        self.reads[k].add(_shares(seen.reads.abs().sum(-1)))
        self.writes[k].add(_shares(seen.beta.abs()))
        self.gains[k].add(self.product.abs().sum(-1).amax(-1).flatten())

    def result(self) -> StreamStatistics:
        """The statistics of what was seen so far."""
        return StreamStatistics(
            *(
                torch.stack([torch.as_tensor(moments.mean) for moments in found])
                for found in (self.similarity, self.reads, self.writes, self.gains)
            )
        )


def pair_cosine(streams: torch.Tensor) -> torch.Tensor:
    """Mean cosine between two different streams of `[B, S, N, D]`, `[B, S]`; NaN when there is only one."""
    n, directions = streams.shape[-2], F.normalize(streams.float(), dim=-1)
    cosines = directions @ directions.transpose(-1, -2)
    return (cosines.sum((-2, -1)) - cosines.diagonal(dim1=-2, dim2=-1).sum(-1)) / (n * (n - 1) or float("nan"))


def _shares(weights: torch.Tensor) -> torch.Tensor:
    """Each weight's part of the sum over streams, `[T, N]`."""
    return (weights / weights.sum(-1, keepdim=True)).flatten(0, -2)
