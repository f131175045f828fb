"""Statistics over tokens that arrive in batches, in memory that does not grow with their number."""

import torch

PERCENTILES = (5, 25, 50, 75, 95)


class Moments:
    """Mean and standard deviation over tokens, each entry for itself."""

    def __init__(self):
        self.count = 0
        self.mean: torch.Tensor | float = 0.0
        self.squares: torch.Tensor | float = 0.0

    def add(self, values: torch.Tensor) -> None:
        """Take in values `[T, ...]` of T tokens. (Chan, Golub and LeVeque's update.)"""
        values = values.cpu().double()  # MPS has no float64
        count, mean = len(values), values.mean(0)
        squares = (values - mean).square().sum(0)
        difference, total = mean - self.mean, self.count + count
        self.squares = self.squares + squares + difference.square() * (self.count * count / total)
        self.mean = self.mean + difference * (count / total)
        self.count = total

    @property
    def deviation(self) -> torch.Tensor:
        """The standard deviation, as of a whole population."""
        return torch.as_tensor(self.squares / self.count).sqrt()


class Sample:
    """A uniform sample of the values that went by, for their percentiles.

    size: how many are kept; as long as there are no more, the percentiles are exact.
    """

    def __init__(self, size: int = 20_000):
        self.size, self.count = size, 0
        self.kept = torch.empty(0)
        self.generator = torch.Generator().manual_seed(0)
        self.keys = torch.empty(0)

    def add(self, values: torch.Tensor) -> None:
        """Take in values of any shape: each draws a number, and those with the smallest stay."""
        values = values.float().cpu().flatten()
        keys = torch.rand(len(values), generator=self.generator)
        self.kept, self.keys = torch.cat([self.kept, values]), torch.cat([self.keys, keys])
        if len(self.kept) > self.size:
            self.keys, order = self.keys.topk(self.size, largest=False)
            self.kept = self.kept[order]

    def percentiles(self, which: tuple[float, ...] = PERCENTILES) -> torch.Tensor:
        """Percentiles of the values, `[len(which)]`."""
        return torch.quantile(self.kept.double(), torch.tensor(which, dtype=torch.float64) / 100)
