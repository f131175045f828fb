"""Time a hyper-connection around an identity branch against the plain residual and against peers.

    python benchmarks/connections.py [--threads 2]

Forward, and forward with backward, in eager mode and compiled, for both forms of the algebra: the matrix product and
the unrolled sums. Writes benchmarks/results/connections.json: medians in milliseconds, and ratios to adding one branch
output to n streams, the least that n streams can cost.
"""

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from hyper_connections.hyper_connections import HyperConnections
from torch import nn

from hf_hyperconn.models import hyper_connections as hc

TOKENS, STREAMS, SIZE = 2048, 4, 1024
REPEATS, WARM_UP = 15, 4


def plain(streams: torch.Tensor) -> torch.Tensor:
    return streams[..., 0, :] + streams[..., 0, :]


def plain_streams(streams: torch.Tensor) -> torch.Tensor:
    return streams + streams[..., :1, :]


def ours(dynamic: bool) -> Callable:
    module = hc.HyperConnection(SIZE, STREAMS, 0, norm=nn.RMSNorm(SIZE) if dynamic else None)
    randomise(module)

    def run(streams: torch.Tensor) -> torch.Tensor:
        branch_input, carry = module.width_connection(streams)
        return module.depth_connection(carry, branch_input)

    return run


def peer(dtype: torch.dtype) -> Callable:
    """The PyPI package hyper-connections, in one dtype throughout; its streams lie in the batch."""
    module = HyperConnections(STREAMS, dim=SIZE, branch=nn.Identity(), layer_index=0).to(dtype)
    randomise(module)

    def run(streams: torch.Tensor) -> torch.Tensor:
        packed = streams.permute(0, 2, 1, 3).reshape(STREAMS, TOKENS, SIZE)
        return module(packed).reshape(1, STREAMS, TOKENS, SIZE).permute(0, 2, 1, 3)

    return run


def randomise(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))


@contextmanager
def form(matrix: bool | None) -> Iterator[None]:
    """Fix the form of the algebra; None leaves the choice to the module."""
    if matrix is None:
        yield
        return
    chosen, compiling = hc._matmul_is_exact, torch.compiler.is_compiling
    hc._matmul_is_exact, torch.compiler.is_compiling = (lambda device: matrix), (lambda: False)
    try:
        yield
    finally:
        hc._matmul_is_exact, torch.compiler.is_compiling = chosen, compiling


CASES = {
    "residual, 1 stream": (lambda dtype: plain, None),
    "residual, n streams": (lambda dtype: plain_streams, None),
    "SHC, as chosen": (lambda dtype: ours(False), None),
    "DHC, as chosen": (lambda dtype: ours(True), None),
    "DHC, matrix form": (lambda dtype: ours(True), True),
    "DHC, unrolled form": (lambda dtype: ours(True), False),
    "hyper-connections (PyPI)": (peer, None),
}


def median_ms(function: Callable, dtype: torch.dtype, backward: bool) -> float:
    streams = torch.randn(1, TOKENS, STREAMS, SIZE).to(dtype).requires_grad_(backward)
    times = []
    for _ in range(WARM_UP + REPEATS):
        started = time.perf_counter()
        with torch.set_grad_enabled(backward):
            result = function(streams)
            if backward:
                result.backward(torch.ones_like(result))
        times.append(time.perf_counter() - started)
    return 1e3 * statistics.median(times[WARM_UP:])


# without them, glibc returns every large buffer to the system and page faults are what is measured
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": "100000000000", "MALLOC_TRIM_THRESHOLD_": "100000000000"}


def main() -> None:
    if not ALLOCATOR.items() <= os.environ.items():
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, **ALLOCATOR})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for mode in ("eager", "compiled"):
            for name, (make, matrix) in CASES.items():
                torch.manual_seed(0)
                torch._dynamo.reset()
                with form(matrix):
                    function = torch.compile(make(dtype), fullgraph=True) if mode == "compiled" else make(dtype)
                    forward, both = (median_ms(function, dtype, backward) for backward in (False, True))
                rows.append(
                    {"case": name, "dtype": str(dtype)[6:], "mode": mode, "forward_ms": forward, "both_ms": both}
                )
                print(f"{rows[-1]['dtype']:<9} {mode:<9} {name:<26} {forward:8.2f} {both:8.2f}", flush=True)
    floors = {(r["dtype"], r["mode"]): r for r in rows if r["case"] == "residual, n streams"}
    for row in rows:
        floor = floors[row["dtype"], row["mode"]]
        row["forward_ratio"] = row["forward_ms"] / floor["forward_ms"]
        row["both_ratio"] = row["both_ms"] / floor["both_ms"]
    result = {
        "device": f"{processor()}, {torch.get_num_threads()} threads",
        "torch": torch.__version__,
        "shape": {"tokens": TOKENS, "streams": STREAMS, "hidden_size": SIZE},
        "rows": [{k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()} for row in rows],
    }
    path = Path(__file__).parent / "results" / "connections.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def processor() -> str:
    """The processor's name, where the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


if __name__ == "__main__":
    main()
