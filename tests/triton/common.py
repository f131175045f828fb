"""What the tests of all fused kernels share."""

import pytest
import torch

from tests.tolerances import KERNELS_BFLOAT16, KERNELS_FLOAT16, KERNELS_FLOAT32

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCES = {torch.float32: KERNELS_FLOAT32, torch.bfloat16: KERNELS_BFLOAT16, torch.float16: KERNELS_FLOAT16}
SIZES = [64, 576, 1000, 2048, 4096, 5129]
ON_GPU = pytest.mark.skipif(DEVICE == "cpu", reason="too large for the interpreter")

# streams of 4 x 64 that lie in memory in some other way
NOT_CONTIGUOUS = {
    "expanded, as the first streams are": lambda: torch.randn(1, 7, 1, 64).expand(1, 7, 4, 64),
    "strided": lambda: torch.randn(1, 14, 6, 128)[:, ::2, 1:5, :64],
    "transposed": lambda: torch.randn(7, 64, 4, 1).permute(3, 0, 2, 1),
    "in batches that do not merge": lambda: torch.randn(5, 3, 4, 64).transpose(0, 1),
}


def seed(k: int) -> torch.Generator:
    """A generator of its own for each k."""
    return torch.Generator().manual_seed(k)
