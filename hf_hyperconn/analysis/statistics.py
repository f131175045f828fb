"""Statistics of connections over tokens in batches. Memory does not grow with the number of tokens.

Meters see the observations of one sub-layer after the other: coefficients, inputs, streams.
"""

from dataclasses import dataclass

import torch
from torch.nn import functional as F

from .observation import Observation

KINDS = ("read", "keep", "mix", "write")  # of coefficients
PERCENTILES = (5, 25, 50, 75, 95)  # of coefficients
SIMILARITY_PERCENTILES = (5, 50, 95)


class Moments:
    """Mean and standard deviation over tokens, elementwise."""

    def __init__(self):
        self.count = 0
        self.mean: torch.Tensor | float = 0.0
        self.squares: torch.Tensor | float = 0.0

    def add(self, values: torch.Tensor) -> None:
        """Add values `[T, ...]` of T tokens, by Chan, Golub and LeVeque's update."""
        values = values.cpu().double()  # MPS has no float64
        count, mean = len(values), values.mean(0)
        squares = (values - mean).square().sum(0)
        difference, total = mean - self.mean, self.count + count
        self.squares = self.squares + squares + difference.square() * (self.count * count / total)
        self.mean = self.mean + difference * (count / total)
        self.count = total

    @property
    def deviation(self) -> torch.Tensor:
        """Return the standard deviation, as of a whole population."""
        return torch.as_tensor(self.squares / self.count).sqrt()


class Sample:
    """A uniform sample of all added rows, for percentiles.

    size: number of rows to keep; up to it percentiles are exact.
    """

    def __init__(self, size: int = 20_000):
        self.size = size
        self.kept, self.keys = torch.empty(0), torch.empty(0)
        self.generator = torch.Generator().manual_seed(0)

    def add(self, rows: torch.Tensor) -> None:
        """Add rows `[T, ...]`. Each draws a number, and the rows with the smallest numbers stay."""
        rows = rows.float().cpu()
        keys = torch.rand(len(rows), generator=self.generator)
        self.kept, self.keys = (
            torch.cat([kept, new]) if len(kept) else new for kept, new in ((self.kept, rows), (self.keys, keys))
        )
        if len(self.kept) > self.size:
            self.keys, order = self.keys.topk(self.size, largest=False)
            self.kept = self.kept[order]

    def percentiles(self, which: tuple[float, ...] = PERCENTILES) -> torch.Tensor:
        """Return percentiles over the rows, `[..., len(which)]`."""
        return torch.quantile(self.kept.double(), torch.tensor(which, dtype=torch.float64) / 100, dim=0).movedim(0, -1)


class CoefficientMeter:
    """Percentiles of the coefficients over tokens, by kind, sub-layer and stream.

    read: a stream's row of A_m. keep: the diagonal of A_r, a stream's weight in itself. mix: the other weights in a
    column of A_r, of other streams in the new one. write: b.

    sub_layers: K.
    """

    def __init__(self, sub_layers: int):
        self.samples = {kind: [Sample() for _ in range(sub_layers)] for kind in KINDS}

    def see(self, seen: Observation) -> None:
        """Add a sub-layer of a forward."""
        n, mixes = seen.beta.shape[-1], seen.mixes.flatten(0, 1)
        others = ~torch.eye(n, dtype=torch.bool, device=mixes.device).expand_as(mixes)
        taken = mixes.transpose(-1, -2)[others].view(len(mixes), n, n - 1)
        rows = (
            seen.reads.flatten(0, 1).transpose(-1, -2).flatten(0, 1),
            mixes.diagonal(dim1=-2, dim2=-1),
            taken.transpose(-1, -2).flatten(0, 1),
            seen.beta.flatten(0, 1),
        )
        for kind, values in zip(KINDS, rows, strict=True):
            self.samples[kind][seen.place].add(values)

    def result(self) -> dict[str, torch.Tensor]:
        """Return `PERCENTILES` by kind, `[K, N, 5]`; there is no "mix" with one stream."""
        return {
            kind: torch.stack([sample.percentiles(PERCENTILES) for sample in samples])
            for kind, samples in self.samples.items()
            if all(len(sample.kept) for sample in samples)
        }


class LayerSimilarity:
    """Cosine similarity, token by token, between the inputs of neighboring branches.

    sub_layers: K.
    """

    def __init__(self, sub_layers: int):
        self.samples = [Sample() for _ in range(sub_layers - 1)]
        self.before: torch.Tensor  # from sub-layer 0 on

    def see(self, seen: Observation) -> None:
        """Add a sub-layer of a forward; sub-layers come in order."""
        k, read = seen.place, seen.branch_input.float()
        if k > 0:
            self.samples[k - 1].add(F.cosine_similarity(read, self.before.to(read.device), dim=-1).flatten())
        self.before = read

    def result(self) -> torch.Tensor:
        """Return 5th percentile, median and 95th percentile between sub-layers k and k + 1, `[K - 1, 3]`."""
        percentiles = torch.empty(len(self.samples), len(SIMILARITY_PERCENTILES), dtype=torch.float64)
        for row, sample in zip(percentiles, self.samples, strict=True):
            row[:] = sample.percentiles(SIMILARITY_PERCENTILES)
        return percentiles


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
        """Add a sub-layer of a forward; sub-layers come in order."""
        k = seen.place
        mix = seen.mixes.transpose(-1, -2)
        self.product = mix if k == 0 else mix @ self.product.to(mix.device)
        self.similarity[k].add(pair_cosine(seen.streams).flatten())
        self.reads[k].add(_shares(seen.reads.abs().sum(-1)))
        self.writes[k].add(_shares(seen.beta.abs()))
        self.gains[k].add(self.product.abs().sum(-1).amax(-1).flatten())

    def result(self) -> StreamStatistics:
        """Return the statistics of the sub-layers seen so far."""
        gathered = (self.similarity, self.reads, self.writes, self.gains)
        return StreamStatistics(*(torch.stack([torch.as_tensor(moments.mean) for moments in row]) for row in gathered))


def pair_cosine(streams: torch.Tensor) -> torch.Tensor:
    """Return the mean cosine `[B, S]` between two different streams of `[B, S, N, D]`; NaN when there is only one."""
    n, directions = streams.shape[-2], F.normalize(streams.float(), dim=-1)
    cosines = directions @ directions.transpose(-1, -2)
    return (cosines.sum((-2, -1)) - cosines.diagonal(dim1=-2, dim2=-1).sum(-1)) / (n * (n - 1) or float("nan"))


def _shares(weights: torch.Tensor) -> torch.Tensor:
    """Return each weight's part of the sum over streams, `[T, N]`."""
    return (weights / weights.sum(-1, keepdim=True)).flatten(0, -2)
