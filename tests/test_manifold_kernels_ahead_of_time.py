"""The fused kernels of mHC and iHC compile for an H200 on a machine without one."""

import re

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from hf_hyperconn.models import mhc_kernels as kernels  # noqa: E402
from hf_hyperconn.models.mhc_triton import _COEFFICIENT_OPTIONS, _OPTIONS, _sizes  # noqa: E402

from .marks import few  # noqa: E402
from .test_kernels_ahead_of_time import H200, PTXAS, spilled  # noqa: E402

WIDTHS = few(range(2, 9), 4)
VALUES = ("streams", "branch_input", "output", "next_streams", "grad", "grad_output", "grad_streams", "grad_input")
SCALARS = ("size", "token_count", "tokens_a_chunk", "iters")
NOT_SPECIALISED = ("token_count", "tokens_a_chunk", "iters")
NAMES = ("project", "coefficients", "read", "write")
NAMES += (*(f"{name}_backward" for name in ("write", "dot", "coefficients", "read", "projection")),)


def compiled(name: str, n: int, dtype: str, mixes: bool, size: int = 2048):
    """A kernel for n streams of `dtype`, compiled for an H200."""
    kernel = getattr(kernels, f"_{name}")
    is_small = name.startswith("coefficients")
    constants = _sizes(n, size, mixes)["coefficients" if is_small else name]
    signature, constexprs, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        key = parameter.name
        if parameter.is_constexpr:
            signature[key], constexprs[(index,)] = "constexpr", constants[key]
            continue
        if key == "eps":
            signature[key] = "fp32"
            continue
        if key in SCALARS or key.endswith("stride"):
            signature[key] = "i32"
        else:
            signature[key] = f"*{dtype}" if key in VALUES or key == "new_grad_streams" else "*fp32"
        if key not in NOT_SPECIALISED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    options = _COEFFICIENT_OPTIONS if is_small else _OPTIONS
    return triton.compile(source, target=GPUTarget("cuda", H200, 32), options=options)


@pytest.mark.parametrize("n", WIDTHS)
@pytest.mark.parametrize("mixes", few((True, False), True))
@pytest.mark.parametrize("name", NAMES)
def test_compiles_for_an_h200(name, mixes, n, tmp_path):
    result = compiled(name, n, "bf16", mixes)
    assert len(result.asm["cubin"]) > 0
    assert re.search(r"\b(atom|red)\.", result.asm["ptx"]) is None, "sums by atomics depend on their order"
    assert result.metadata.shared <= 48 * 1024
    if PTXAS.is_file():
        assert spilled(result.asm["ptx"], tmp_path) <= 64


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("name", NAMES)
def test_other_dtypes_compile(name, dtype):
    for mixes in (True, False):
        assert compiled(name, 4, dtype, mixes).asm["cubin"]
