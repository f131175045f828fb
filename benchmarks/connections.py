"""Time a hyper-connection around an identity branch against the plain residual and against peers.

    python -m benchmarks.connections [--threads 2]

Forward, and forward with backward, in eager mode and compiled. Writes benchmarks/results/connections.json (on a GPU
connections_cuda.json): medians in milliseconds, ratios to adding one branch output to n streams, the least that n
streams can cost, called in turn with each case, and beside each the rows of D a token that an ideal implementation
would move.
"""

import argparse
from collections.abc import Callable
from itertools import product
from types import SimpleNamespace

import torch
from hyper_connections.hyper_connections import HyperConnections
from torch import nn
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection

from benchmarks.timing import device, file_name, keep_memory, measured, medians_ms, write
from hf_hyperconn import set_hc_implementation
from hf_hyperconn.models.hyper_connections import HyperConnection
from hf_hyperconn.models.manifold_hyper_connections import ManifoldHyperConnection

SHAPES = {"cpu": (2048, 4, 1024), "cuda": (8192, 4, 2048)}
TOKENS, STREAMS, SIZE = SHAPES[device()]

# rows of D that one token's forward, and forward with backward, must move: streams in, branch out and in, streams out
N = STREAMS
FLOORS = {
    "residual, 1 stream": (3, 6),
    "residual, n streams": (2 * N + 1, 4 * N + 1),
    "unfused": (4 * N + 2, 8 * N + 5),
    "boundary-fused": (2 * N + 2, 5 * N + 5),
}


def plain(streams: torch.Tensor) -> torch.Tensor:
    return streams[..., 0, :] + streams[..., 0, :]


def plain_streams(streams: torch.Tensor) -> torch.Tensor:
    return streams + streams[..., :1, :]


def shc() -> nn.Module:
    return HyperConnection(SIZE, STREAMS, 0)


def dhc() -> nn.Module:
    return HyperConnection(SIZE, STREAMS, 0, norm=nn.RMSNorm(SIZE, eps=1e-6))


def mhc() -> nn.Module:
    return ManifoldHyperConnection(SIZE, STREAMS, 0)


def ours(make: Callable[[], nn.Module], implementation: str = "torch", by_autograd: bool = False) -> Callable:
    """Our connection; by_autograd: Algorithm 2 of the paper, differentiated as it stands."""
    module = make().to(device())
    randomize(module)
    if by_autograd:
        module.coefficient_parameters = lambda dtype: None
    set_hc_implementation(implementation)

    def run(streams: torch.Tensor) -> torch.Tensor:
        branch_input, carry = module.width_connection(streams)
        return carry.write(branch_input).written()

    return run


def lucidrains(dtype: torch.dtype) -> Callable:
    """Return the PyPI package hyper-connections, in one dtype throughout; its streams lie in the batch."""
    module = HyperConnections(STREAMS, dim=SIZE, branch=nn.Identity(), layer_index=0).to(device(), dtype)
    randomize(module)

    def run(streams: torch.Tensor) -> torch.Tensor:
        packed = streams.permute(0, 2, 1, 3).reshape(STREAMS, TOKENS, SIZE)
        return module(packed).reshape(1, STREAMS, TOKENS, SIZE).permute(0, 2, 1, 3)

    return run


def deepseek_v4() -> Callable:
    """Return the mHC module of Transformers' DeepSeek-V4, written as its decoder layer writes."""
    config = SimpleNamespace(hc_mult=STREAMS, hidden_size=SIZE, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6)
    module = DeepseekV4HyperConnection(config).to(device())
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_(std=0.02)

    def run(streams: torch.Tensor) -> torch.Tensor:
        post, comb, collapsed = module(streams)
        mixed = torch.matmul(comb.to(streams.dtype).transpose(-1, -2), streams)
        return post.to(streams.dtype).unsqueeze(-1) * collapsed.unsqueeze(-2) + mixed

    return run


def liger() -> Callable:
    """Return the fused mHC kernels of liger-kernel."""
    from liger_kernel.transformers.functional import liger_mhc_forward

    columns = STREAMS * (STREAMS + 2)
    phi = (0.02 * torch.randn(STREAMS * SIZE, columns, device=device())).requires_grad_()
    bias, *scales = torch.zeros(columns, device=device()), *torch.full((3,), 0.01, device=device())

    def run(streams: torch.Tensor) -> torch.Tensor:
        return liger_mhc_forward(streams, nn.Identity(), phi, bias, *scales, allow_fp32=True)

    return run


def randomize(module: nn.Module) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.02 * torch.randn_like(parameter))


LEAST = "residual, n streams"
# what makes each, and the rows of D that it would move at best
CASES: dict[str, tuple[Callable[[torch.dtype], Callable], str]] = {
    "residual, 1 stream": (lambda dtype: plain, "residual, 1 stream"),
    "residual, n streams": (lambda dtype: plain_streams, "residual, n streams"),
    "SHC": (lambda dtype: ours(shc), "unfused"),
    "DHC": (lambda dtype: ours(dhc), "unfused"),
    "DHC, Algorithm 2 by autograd": (lambda dtype: ours(dhc, by_autograd=True), "unfused"),
    "DHC of hyper-connections (PyPI)": (lucidrains, "unfused"),
    "mHC of Transformers' DeepSeek-V4": (lambda dtype: deepseek_v4(), "unfused"),
}
ON_A_GPU = {
    "SHC, fused": (lambda dtype: ours(shc, "triton"), "boundary-fused"),
    "DHC, fused": (lambda dtype: ours(dhc, "triton"), "boundary-fused"),
    "mHC, fused": (lambda dtype: ours(mhc, "triton"), "boundary-fused"),
    "mHC of liger-kernel": (lambda dtype: liger(), "unfused"),
}


def calls(function: Callable, dtype: torch.dtype) -> tuple[Callable, Callable]:
    """Return a forward without gradients, and a forward with its backward."""
    streams = torch.randn(1, TOKENS, STREAMS, SIZE, device=device()).to(dtype)
    trained = streams.clone().requires_grad_()
    grad = torch.randn_like(function(streams))

    def forward() -> None:
        with torch.no_grad():
            function(streams)

    def both() -> None:
        trained.grad = None
        function(trained).backward(grad)

    return forward, both


def times(make: Callable, dtype: torch.dtype, mode: str) -> dict[str, float]:
    """Milliseconds of a case, and ratios to the least that n streams can cost."""
    torch.manual_seed(0)
    torch.compiler.reset()
    compared = []
    for make_function in (make, CASES[LEAST][0]):
        function = make_function(dtype)
        compared.append(calls(function if mode == "eager" else torch.compile(function, fullgraph=True), dtype))
    figures = {}
    for what, pair in zip(("forward", "both"), zip(*compared, strict=True), strict=True):
        taken, least = medians_ms(pair)
        figures |= {f"{what}_ms": round(taken, 3), f"{what}_ratio": round(taken / least, 3)}
    return figures


def main() -> None:
    keep_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    cases = CASES if device() == "cpu" else {**CASES, **ON_A_GPU}
    parser.add_argument("--cases", nargs="+", choices=cases, default=list(cases), help="others stay as measured here")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if device() == "cpu":
        print(f"no GPU here: not measured are {', '.join(ON_A_GPU)}.")
    print(f"{'':<51} forward        both           rows at best")
    name = file_name("connections")
    rows = [row for row in measured(name) if row["case"] not in arguments.cases]
    for case in arguments.cases:
        make, floor = cases[case]
        for dtype, mode in product((torch.float32, torch.bfloat16), ("eager", "compiled")):
            row = {"case": case, "dtype": str(dtype)[6:], "mode": mode, **times(make, dtype, mode)}
            rows.append({**row, "rows_at_best": FLOORS[floor]})
            taken = "".join(f"{row[f'{what}_ms']:7.2f} {row[f'{what}_ratio']:5.1f}x" for what in ("forward", "both"))
            print(f"{row['dtype']:<9} {mode:<9} {case:<32}{taken}   {FLOORS[floor]}", flush=True)
        write(name, {"shape": {"tokens": TOKENS, "streams": STREAMS, "hidden_size": SIZE}, "rows": rows})
    set_hc_implementation("auto")


if __name__ == "__main__":
    main()
