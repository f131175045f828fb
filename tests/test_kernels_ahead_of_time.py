"""The fused kernels compile for an H200 on a machine without one, by Triton's own compiler."""

import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from hf_hyperconn.models import attnres_triton, hc_triton, mhc_triton  # noqa: E402

from .marks import few, tail  # noqa: E402

H200 = 90
# bytes; on an H100, kernels of DHC of half as many values a thread spill nothing and take longer
SPILLED, SPILLED_BY_MHC = 48, 64
SPILLED_BY_ROWS = {2048: 0, 8192: 0, 16384: 144}  # of D values, of which attention residuals hold four a program
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
# arguments that are pointers to streams or rows, in their dtype; other pointers are to float32
VALUES = ("streams", "output", "next_streams", "branch_input", "rounding", "grad", "grad_input", "grad_output")
VALUES += ("residual", "first", "last", "first_grad", "last_grad")
NOT_SPECIALIZED = ("token_count", "tokens_a_chunk", "chunks", "iters", "first_count", "last_count")
STEPS = {  # the halves of a step, for the kernels that it launches
    "read": {"WRITES": False, "READS": True, "DYNAMIC": True},
    "write and read": {"WRITES": True, "READS": True, "DYNAMIC": True},
    "write": {"WRITES": True, "READS": False, "DYNAMIC": False},
    "read, static": {"WRITES": False, "READS": True, "DYNAMIC": False},
    "write and read, static": {"WRITES": True, "READS": True, "DYNAMIC": False},
}
OF_MHC = ("project", "coefficients", "read", "write")
OF_MHC += (*(f"{name}_backward" for name in ("write", "dot", "coefficients", "read", "projection")),)


def compiled(kernel, constants: dict, dtype: str, options: dict):
    """The kernel for streams of `dtype`, compiled for an H200."""
    signature, constexprs, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constexprs[(index,)] = "constexpr", constants[name]
        elif name == "eps":
            signature[name] = "fp32"
        elif name in ("size", *NOT_SPECIALIZED) or name.endswith("stride"):
            signature[name] = "i32"
        else:
            signature[name] = f"*{dtype}" if name in VALUES or name.endswith("grad_streams") else "*fp32"
        if signature[name] not in ("constexpr", "fp32") and name not in NOT_SPECIALIZED:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(source, target=GPUTarget("cuda", H200, 32), options=options)


def of_a_step(name: str, n: int, dtype: str, **flags: bool):
    """A kernel of DHC and SHC for n streams of D = 2048."""
    sizes = {"_parameters": hc_triton._parameter_sizes, "_total": hc_triton._total_sizes}.get(name, hc_triton._sizes)
    constants = {**sizes(n, 2048), **flags, "WEIGHT": True}
    options = {**hc_triton._OPTIONS, "num_warps": constants["num_warps"]}
    return compiled(getattr(hc_triton, name), constants, dtype, options)


def of_mhc(name: str, n: int, dtype: str, mixes: bool):
    """A kernel of mHC or iHC for n streams of D = 2048."""
    is_small = name.startswith("coefficients")
    constants = mhc_triton._sizes(n, 2048, mixes)["coefficients" if is_small else name]
    options = mhc_triton._COEFFICIENT_OPTIONS if is_small else mhc_triton._OPTIONS
    return compiled(getattr(mhc_triton, f"_{name}"), constants, dtype, options)


def of_attention_residuals(name: str, size: int, dtype: str, adds_residual: bool):
    """A kernel of attention residuals for values of D."""
    constants = {**attnres_triton._sizes(size), "ADDS_RESIDUAL": adds_residual}
    return compiled(
        getattr(attnres_triton, name),
        constants,
        dtype,
        {**attnres_triton._OPTIONS, "num_warps": constants["num_warps"]},
    )


def check(result, folder: Path, most_spilled: int) -> None:
    """A kernel has no atomics, fits into shared memory, and spills few bytes of registers to memory."""
    assert len(result.asm["cubin"]) > 0
    assert not re.search(r"\b(atom|red)\.", result.asm["ptx"]), "sums by atomics depend on their order"
    assert result.metadata.shared <= 48 * 1024
    if PTXAS.is_file():
        (folder / "kernel.ptx").write_text(result.asm["ptx"])
        command = [PTXAS, "-v", f"-arch=sm_{H200}a", folder / "kernel.ptx", "-o", folder / "kernel.cubin"]
        report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        assert int(re.search(r"(\d+) bytes spill stores", report).group(1)) <= most_spilled


@pytest.mark.parametrize("n", few(range(1, 9), 4, tail=(3, 5, 6, 7)))
@pytest.mark.parametrize("step", few(STEPS, "write and read"))
def test_steps_compile(step, n, tmp_path):
    flags = {**STEPS[step], "OFFSET": False, "CENTRED": False, "TANH": True}
    for name in ("_forward", "_backward", *(["_parameters", "_total"] if flags["DYNAMIC"] else [])):
        check(of_a_step(name, n, "bf16", **flags), tmp_path, SPILLED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "centred"), [("fp16", True), ("fp32", False), *tail(("fp16", False), ("fp32", True))]
)
def test_steps_of_other_dtypes_and_norms_compile(dtype, centred):
    for flags in STEPS.values():
        for name in ("_forward", "_backward"):
            norm = {"OFFSET": centred, "CENTRED": centred, "TANH": not centred}
            assert of_a_step(name, 4, dtype, **flags, **norm).asm["cubin"]


@pytest.mark.parametrize("n", few(range(2, 9), 4, tail=(3, 5, 6, 7)))
@pytest.mark.parametrize("mixes", few((True, False), True))
@pytest.mark.parametrize("name", OF_MHC)
def test_mhc_compiles(name, mixes, n, tmp_path):
    check(of_mhc(name, n, "bf16", mixes), tmp_path, SPILLED_BY_MHC)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", *tail("fp16")])
@pytest.mark.parametrize("name", OF_MHC)
def test_mhc_of_other_dtypes_compiles(name, dtype):
    for mixes in (True, False):
        assert of_mhc(name, 4, dtype, mixes).asm["cubin"]


@pytest.mark.parametrize("adds_residual", few((True, False), True))
@pytest.mark.parametrize("size", few(SPILLED_BY_ROWS, 2048, 16384))
@pytest.mark.parametrize("name", ["_read", "_read_backward"])
def test_attention_residuals_compile(name, size, adds_residual, tmp_path):
    check(of_attention_residuals(name, size, "bf16", adds_residual), tmp_path, SPILLED_BY_ROWS[size])


def test_weights_of_equal_scores_are_divided_exactly():
    """By the division that rounds to nearest: an approximate one may be off 1."""
    assert "div.rn.f32" in of_attention_residuals("_read", 2048, "bf16", True).asm["ptx"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp32", *tail("fp16")])
@pytest.mark.parametrize("name", ["_read", "_read_backward"])
def test_attention_residuals_of_other_dtypes_compile(name, dtype):
    assert of_attention_residuals(name, 2048, dtype, True).asm["cubin"]
