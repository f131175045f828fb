"""Time one read of attention residuals against flash-linear-attention's on the same inputs, and compare the results.

    python -m benchmarks.attention_residuals

Our torch implementation, `naive_attnres` of flash-linear-attention where it is installed (`pip install fla-core
einops`), and on a GPU our fused kernels and its `fused_attnres`. Forward, and forward with backward, of the paper's
form ("mean") over M values, which lie in streams for ours and in a list for theirs. Writes
benchmarks/results/attention_residuals.json (on a GPU attention_residuals_cuda.json): medians in milliseconds (of one
thread's time on a CPU), and how far h and the gradients are from ours in float64 at most, in units of the largest
value.
"""

import argparse
import time
from collections.abc import Callable
from itertools import product

import torch

from benchmarks.timing import device, file_name, keep_memory, medians_ms, write
from hf_hyperconn import set_hc_implementation
from hf_hyperconn.models.attention_residuals import Values

try:
    from fla.ops.attnres import fused_attnres, naive_attnres
except ImportError:
    fused_attnres = naive_attnres = None

TOKENS, SIZE = {"cpu": (256, 1024), "cuda": (8192, 2048)}[device()]
COUNTS = (5, 9, 33)  # M: blocks of 8 in a Llama of 16 and of 32 layers, and the full form in one of 16
EPS = 1e-6
Tensors = list[torch.Tensor]


class Ours:
    """Our read, of a query and streams `[1, S, 1 + M, D]`."""

    def __init__(self, implementation: str):
        self.implementation = implementation

    def leaves(self, query: torch.Tensor, values: torch.Tensor) -> Tensors:
        """Return a copy of what is read, of values `[1, S, M, D]`."""
        return [query.clone(), torch.cat([values[..., :1, :], values], dim=-2)]

    def read(self, query: torch.Tensor, streams: torch.Tensor) -> torch.Tensor:
        """Return h, `[1, S, D]`."""
        set_hc_implementation(self.implementation)
        return Values.of_streams(streams).read(query, "mean", EPS)

    def of_values(self, grads: Tensors) -> torch.Tensor:
        """Return the gradient of the values."""
        return grads[0][..., 1:, :]


class Theirs:
    """That of flash-linear-attention, of a query and a list of values `[1, S, D]`; the weight of their norm is 1."""

    def __init__(self, function: Callable):
        self.function = function

    def leaves(self, query: torch.Tensor, values: torch.Tensor) -> Tensors:
        return [query.clone(), *(value.contiguous() for value in values.unbind(-2))]

    def read(self, query: torch.Tensor, *values: torch.Tensor) -> torch.Tensor:
        return self.function(query, values, torch.ones_like(query), rms_eps=EPS)

    def of_values(self, grads: Tensors) -> torch.Tensor:
        return torch.stack(grads, dim=-2)


CASES: dict[str, Ours | Theirs] = {"torch": Ours("torch")}
if device() == "cuda":
    CASES["fused"] = Ours("triton")
if naive_attnres is not None:
    CASES["fla, naive"] = Theirs(naive_attnres)
    if device() == "cuda":
        CASES["fla, fused"] = Theirs(fused_attnres)


def inputs(count: int, dtype: torch.dtype) -> Tensors:
    """Return a query, values `[1, S, M, D]` and a gradient of h."""
    generator = torch.Generator(device()).manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device())

    return [SIZE**-0.5 * normal(SIZE), normal(1, TOKENS, count, SIZE).to(dtype), normal(1, TOKENS, SIZE).to(dtype)]


def calls(case: Ours | Theirs, query: torch.Tensor, values: torch.Tensor, grad: torch.Tensor) -> tuple[Callable, ...]:
    """Return a forward without gradients, and a forward with its backward, which returns h and the gradients."""
    plain = case.leaves(query, values)
    trained = [leaf.requires_grad_() for leaf in case.leaves(query, values)]

    def forward() -> None:
        with torch.no_grad():
            case.read(*plain)

    def both() -> Tensors:
        read = case.read(*trained)
        return [read.detach(), *torch.autograd.grad(read, trained, grad)]

    return forward, both


def results(case: Ours | Theirs, given: Tensors) -> Tensors:
    """Return h and the gradients of query and values."""
    read, of_query, *others = calls(case, *given)[1]()
    return [read, of_query, case.of_values(others)]


def row(count: int, dtype: torch.dtype) -> dict:
    """Return the times and errors of every case for M values."""
    given = inputs(count, dtype)
    pairs = zip(*(calls(case, *given) for case in CASES.values()), strict=True)
    clock = time.thread_time if device() == "cpu" else time.perf_counter
    times = {
        what: medians_ms(functions, clock=clock) for what, functions in zip(("forward", "both"), pairs, strict=True)
    }
    exact = results(Ours("torch"), [tensor.double() for tensor in given])
    found = {"values": count, "dtype": str(dtype)[6:], "cases": {}}
    for place, (name, case) in enumerate(CASES.items()):
        errors = [
            ((mine.double() - other).abs().max() / other.abs().max()).item()
            for mine, other in zip(results(case, given), exact, strict=True)
        ]
        figures = {f"{what}_ms": round(measured[place], 3) for what, measured in times.items()}
        found["cases"][name] = {**figures, "error": float(f"{max(errors):.1e}")}
    return found


def main() -> None:
    keep_memory()
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    if naive_attnres is None:
        print("flash-linear-attention is not installed: not measured.")
    if device() == "cpu":
        print("no GPU here: the fused kernels are not measured.")
    rows = []
    for count, dtype in product(COUNTS, (torch.float32, torch.bfloat16)):
        rows.append(row(count, dtype))
        print(rows[-1], flush=True)
    set_hc_implementation("auto")
    write(file_name("attention_residuals"), {"shape": {"tokens": TOKENS, "hidden_size": SIZE}, "rows": rows})


if __name__ == "__main__":
    main()
