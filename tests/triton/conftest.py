"""Triton's interpreter truncates float32 to bfloat16, where a GPU rounds to nearest even; here it does the latter."""

import os
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from hf_hyperconn import set_hc_implementation

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_to_nearest(values, input_dtype, output_dtype, rounding_mode):
        if (input_dtype, output_dtype) != (tl.float32, tl.bfloat16):
            return convert(values, input_dtype, output_dtype, rounding_mode)
        bits = np.frombuffer(values.tobytes(), dtype=np.uint32).astype(np.uint64)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        is_nan = (bits & 0x7FFFFFFF) > 0x7F800000
        return np.where(is_nan, (bits >> 16) | 0x40, rounded).astype(np.uint16).reshape(values.shape)

    interpreter._convert_float = convert_to_nearest


@pytest.fixture(autouse=True, scope="session")
def bfloat16_is_rounded():
    """The repair above holds for whatever version of Triton is installed."""
    import triton
    import triton.language as tl

    @triton.jit
    def copy(source, target, SIZE: tl.constexpr):
        index = tl.arange(0, SIZE)
        tl.store(target + index, tl.load(source + index).to(tl.bfloat16))

    values = torch.randn(1024, device="cuda" if torch.cuda.is_available() else "cpu")
    target = torch.empty_like(values, dtype=torch.bfloat16)
    copy[(1,)](values, target, 1024)
    assert torch.equal(target, values.bfloat16())


@pytest.fixture(autouse=True)
def poisoned_triton() -> Iterator[None]:
    """Only the kernels, and every tensor that is not yet written holds NaN."""
    set_hc_implementation("triton")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)
    set_hc_implementation("auto")
