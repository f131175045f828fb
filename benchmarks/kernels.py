"""Time the fused kernels of a step that writes and reads, on a GPU, against copying as many bytes.

    python -m benchmarks.kernels

Forward, backward and the gradients of parameters, each in a CUDA graph of its own, so that launching takes no time.
Writes benchmarks/results/kernels_cuda.json: microseconds, and the speed of a copy in GB/s.
"""

from collections.abc import Callable

import torch
from triton.testing import do_bench_cudagraph

from benchmarks.timing import write
from hf_hyperconn.models import hc_triton as operators

# tokens, N, D, dtype
SHAPES = (
    (8192, 4, 2048, torch.bfloat16),
    (4096, 4, 4096, torch.bfloat16),
    (2048, 4, 8192, torch.bfloat16),
    (4096, 4, 3072, torch.bfloat16),
    (4096, 4, 2048, torch.float32),
    (8192, 4, 384, torch.float32),
    (8192, 2, 2048, torch.bfloat16),
    (4096, 8, 2048, torch.bfloat16),
)
COPIED = 2**28  # values of two bytes


def microseconds(function: Callable[[], object]) -> float:
    return round(1e3 * do_bench_cudagraph(function, rep=15), 1)


def copy_speed() -> float:
    """GB/s, what is read and what is written counted."""
    source = torch.randn(COPIED, dtype=torch.bfloat16, device="cuda")
    target = torch.empty_like(source)
    return round(2 * 2 * COPIED / 1e3 / microseconds(lambda: target.copy_(source)), 0)


def row(tokens: int, n: int, size: int, dtype: torch.dtype) -> dict:
    """Return the times of one shape, on random values."""
    torch.manual_seed(0)

    def values(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return scale * torch.randn(shape, device="cuda")

    def rows(*shape: int) -> torch.Tensor:
        return values(1, tokens, *shape).to(dtype)

    streams, output, grad_streams, grad_input = rows(n, size), rows(size), rows(n, size), rows(size)
    written, beta, grad_beta = (
        values(1, tokens, n * (2 * n + 4), scale=0.3),
        values(1, tokens, n),
        values(1, tokens, n),
    )
    static, fn, scale = (values(n, n + 1, scale=0.3), values(n, scale=0.3)), values(n + 2, size, scale=size**-0.5), 0.3
    settings = fn, None, torch.full((1,), scale, device="cuda"), torch.full((1,), scale, device="cuda")
    parts, weight = (fn[:-1].t().contiguous(), fn[-1].contiguous()), values(size)
    write = streams, written, beta, output

    def forward() -> list[torch.Tensor]:
        return operators._step_forward(*write, *static, *settings, 1e-6, False, True)

    _, _, read, _ = forward()

    def backward() -> list[torch.Tensor]:
        return operators._step_backward(*write, *settings, read, False, True, grad_streams, grad_input, grad_beta)

    grads = backward()[1]

    def parameters() -> list[torch.Tensor]:
        return operators._parameters_backward(*write, read, grads, *parts, weight, None, False)

    taken = {kernel.__name__: microseconds(kernel) for kernel in (forward, backward, parameters)}
    return {"tokens": tokens, "streams": n, "hidden_size": size, "dtype": str(dtype)[6:], "us": taken}


def main() -> None:
    if not torch.cuda.is_available():
        print("no GPU here: the fused kernels are not measured.")
        return
    rows = []
    for shape in SHAPES:
        rows.append(row(*shape))
        print(rows[-1], flush=True)
        write("kernels_cuda.json", {"copy_gb_s": copy_speed(), "rows": rows})


if __name__ == "__main__":
    main()
