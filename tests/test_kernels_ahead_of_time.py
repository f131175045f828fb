"""The fused kernels compile for an H200 on a machine without one, by Triton's own compiler."""

import re
import subprocess
from pathlib import Path

import pytest

from hf_hyperconn.models.hc_triton import _OPTIONS, _backward, _forward, _projection, _projection_sizes, _sizes

triton = pytest.importorskip("triton")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from .marks import few  # noqa: E402

H200 = 90
SPILLED = 48  # bytes; on an H100, kernels of half as many values a thread spill nothing and take longer
PTXAS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "ptxas-blackwell"
VALUES = ("streams", "output", "next_streams", "branch_input", "rounding", "grad_input", "grad_output")
KINDS = {  # what a step does, for the kernels that it launches
    "read": {"WRITES": False, "READS": True, "DYNAMIC": True},
    "write and read": {"WRITES": True, "READS": True, "DYNAMIC": True},
    "write": {"WRITES": True, "READS": False, "DYNAMIC": False},
    "read, static": {"WRITES": False, "READS": True, "DYNAMIC": False},
    "write and read, static": {"WRITES": True, "READS": True, "DYNAMIC": False},
}


def compiled(kernel, n: int, dtype: str, **flags: bool):
    """The kernel for n streams of `dtype` and D = 2048, compiled for an H200."""
    sizes = _projection_sizes if kernel is _projection else _sizes
    constants = {**sizes(n, 2048), **flags}
    signature, constexprs, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name], constexprs[(index,)] = "constexpr", constants[name]
        elif name == "eps":
            signature[name] = "fp32"
        elif name == "size" or name.endswith(("stride", "token_count", "tokens_a_chunk")):
            signature[name] = "i32"
        else:
            is_value = name in VALUES or name.endswith("grad_streams")
            signature[name] = f"*{dtype}" if is_value else "*fp32"
        if signature[name] != "constexpr" and signature[name] != "fp32" and "token" not in name.split("_")[0]:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constexprs, attrs=attributes)
    return triton.compile(
        source, target=GPUTarget("cuda", H200, 32), options={**_OPTIONS, "num_warps": constants["num_warps"]}
    )


def spilled(ptx: str, folder: Path) -> int:
    """Bytes of registers that a program for an H200 spills to memory."""
    (folder / "kernel.ptx").write_text(ptx)
    command = [PTXAS, "-v", f"-arch=sm_{H200}a", folder / "kernel.ptx", "-o", folder / "kernel.cubin"]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    return int(re.search(r"(\d+) bytes spill stores", report).group(1))


@pytest.mark.parametrize("n", few(range(1, 9), 4))
@pytest.mark.parametrize("kind", few(KINDS, "write and read"))
def test_compiles_for_an_h200(kind, n, tmp_path):
    common = {"OFFSET": False, "CENTRED": False, "TANH": True}
    kernels = [(_forward, {**common, **KINDS[kind]}), (_backward, {**common, **KINDS[kind]})]
    if KINDS[kind]["DYNAMIC"]:
        kernels.append((_projection, {"WRITES": KINDS[kind]["WRITES"], "CENTRED": False}))
    for kernel, flags in kernels:
        result = compiled(kernel, n, "bf16", **flags)
        ptx = result.asm["ptx"]
        assert len(result.asm["cubin"]) > 0
        assert not re.search(r"\b(atom|red)\.", ptx), "sums by atomics depend on their order"
        assert result.metadata.shared <= 48 * 1024
        if PTXAS.is_file():
            assert spilled(ptx, tmp_path) <= SPILLED, kernel


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("centred", [False, True])
def test_other_dtypes_and_norms_compile(dtype, centred):
    flags = {"OFFSET": centred, "CENTRED": centred, "TANH": not centred}
    for kind in KINDS.values():
        for kernel in (_forward, _backward):
            assert compiled(kernel, 4, dtype, **flags, **kind).asm["cubin"]
