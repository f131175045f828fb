"""Time what a connection costs the processor in eager mode, where its kernels are launched.

    python -m benchmarks.host_time [--before CHECKOUT]

Triton compiles its kernels for an H100 and launches them by a driver that does nothing. So only the processor's work
is left: Python, torch's dispatcher, autograd, memory, and Triton up to the call of CUDA's driver. Models of 8 layers
of width 64 see four tokens, whose arithmetic takes no time to speak of. Timed are a forward without gradients, and a
training step, which is a forward and its backward. The figure of a connection is its model's time minus the plain
model's, over the 16 connections; the plain model's is over as many sub-layers. Times are of one thread
(`time.thread_time`), medians of calls in turn.

Peers are layers of the same Llama with the connections of hyper-connections (PyPI) and of Transformers' DeepSeek-V4.
They have no kernels, and compute their few values on the processor. To launch them on a GPU would take about as long,
so nothing is taken off. Launches of kernels, and torch's operations that launch one on a GPU, are counted beside the
times.

With --before another checkout is measured, too, each in processes of its own, in turn. Writes
benchmarks/results/host_time.json.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton
from hyper_connections.hyper_connections import HyperConnections
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HyperConnection
from triton.backends.compiler import GPUTarget

from benchmarks.llamas import PLAIN
from benchmarks.timing import file_name, medians_ms, write
from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM, set_hc_implementation
from hf_hyperconn.models import computing

LAYERS, SIZE, STREAMS, TOKENS = 8, 64, 4, 4
SHAPE = {
    "num_hidden_layers": LAYERS,
    "hidden_size": SIZE,
    "intermediate_size": 2 * SIZE,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 64,
}
KINDS = {"DHC×4": "dhc", "SHC×4": "shc", "mHC×4": "mhc", "iHC×4": "ihc"}
PEERS = {"hyper-connections (PyPI), DHC×4": "lucidrains", "Transformers' DeepSeek-V4, mHC×4": "deepseek_v4"}
SUB_LAYERS = 2 * LAYERS
REPEATS, ROUNDS = 25, 2
FIGURES = ("forward_ms", "step_ms", "kernels", "operations")
RUN = "import runpy, sys; runpy.run_path(sys.argv.pop(1), run_name='__main__')"  # with the package of this folder


class Binaries:
    """Loads no kernel."""

    def load_binary(self, *arguments: Any) -> tuple[int, ...]:
        """Return a module, a function, registers, spills, and the most threads."""
        return 1, 1, 0, 0, 1024

    def unload_module(self, module: int) -> None:
        pass

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 2**18}


class Launcher:
    """Launches a compiled kernel nowhere, and counts the launches of all."""

    launches = 0

    def __init__(self, source: Any, metadata: Any):
        pass

    def __call__(self, *arguments: Any) -> None:
        Launcher.launches += 1


class Driver:
    """Triton's driver of a GPU that is not there."""

    utils, launcher_cls = Binaries(), Launcher

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Launching(TorchDispatchMode):
    """Counts torch's operations that launch a kernel on a GPU: all but views and empty tensors."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        returns_view = any(value.alias_info is not None for value in function._schema.returns)
        is_launched = function._schema.is_mutable or not (returns_view or "empty" in function.name())
        self.count += is_launched and bool(function._schema.returns) and "promote_types" not in function.name()
        return function(*args, **(kwargs or {}))


class LucidrainsLayer(nn.Module):
    """A layer of Llama whose additions are connections of the package hyper-connections."""

    def __init__(self, layer: nn.Module, index: int):
        super().__init__()
        self.layer, self.index = layer, index
        self.connections = nn.ModuleList(
            HyperConnections(STREAMS, dim=SIZE, layer_index=2 * index + k) for k in (0, 1)
        )

    def forward(self, streams: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.index == 0:
            streams = streams.repeat_interleave(STREAMS, dim=0)
        branch_input, add = self.connections[0](streams)
        streams = add(self.layer.self_attn(hidden_states=self.layer.input_layernorm(branch_input), **kwargs)[0])
        branch_input, add = self.connections[1](streams)
        streams = add(self.layer.mlp(self.layer.post_attention_layernorm(branch_input)))
        return streams.unflatten(0, (-1, STREAMS)).sum(1) if self.index == LAYERS - 1 else streams


class DeepseekLayer(nn.Module):
    """A layer of Llama whose additions are connections of DeepSeek-V4, written as its decoder layer writes them."""

    def __init__(self, layer: nn.Module, index: int):
        super().__init__()
        self.layer, self.index = layer, index
        config = SimpleNamespace(
            hc_mult=STREAMS, hidden_size=SIZE, hc_sinkhorn_iters=20, hc_eps=1e-6, rms_norm_eps=1e-6
        )
        self.connections = nn.ModuleList(DeepseekV4HyperConnection(config) for _ in range(2))
        for parameter in self.connections.parameters():
            nn.init.normal_(parameter, std=0.02)

    def forward(self, streams: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.index == 0:
            streams = streams.unsqueeze(-2).repeat(1, 1, STREAMS, 1)
        post, mix, x = self.connections[0](streams)
        x = self.layer.self_attn(hidden_states=self.layer.input_layernorm(x), **kwargs)[0]
        streams = post.unsqueeze(-1) * x.unsqueeze(-2) + torch.matmul(mix.transpose(-1, -2), streams)
        post, mix, x = self.connections[1](streams)
        x = self.layer.mlp(self.layer.post_attention_layernorm(x))
        streams = post.unsqueeze(-1) * x.unsqueeze(-2) + torch.matmul(mix.transpose(-1, -2), streams)
        return streams.mean(-2) if self.index == LAYERS - 1 else streams


def build(case: str) -> nn.Module:
    """Return the model of a case, with random weights."""
    torch.manual_seed(0)
    if case in KINDS:
        return HCLlamaForCausalLM(HCLlamaConfig(**SHAPE, connection=KINDS[case]))
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    if case in PEERS:
        layer_class = {"lucidrains": LucidrainsLayer, "deepseek_v4": DeepseekLayer}[PEERS[case]]
        layers = [layer_class(layer, index) for index, layer in enumerate(model.model.layers)]
        model.model.layers = nn.ModuleList(layers)
    return model


def calls(model: nn.Module) -> tuple[Callable[[], None], Callable[[], None]]:
    """Return a forward without gradients and a training step of a model."""
    tokens, parameters = torch.arange(TOKENS)[None], list(model.parameters())

    def forward() -> None:
        with torch.no_grad():
            model(tokens, use_cache=False)

    def step() -> None:
        for parameter in parameters:
            parameter.grad = None
        model(tokens, labels=tokens, use_cache=False).loss.backward()

    return forward, step


def launches(function: Callable[[], None]) -> tuple[int, int]:
    """Return how many of our kernels and of torch's operations a call launches."""
    is_recorded, before = computing._is_recorded, Launcher.launches
    computing._is_recorded = lambda arguments: False  # as where no mode counts
    try:
        with Launching() as torchs:
            function()
    finally:
        computing._is_recorded = is_recorded
    return Launcher.launches - before, torchs.count


def without_gpu() -> None:
    """Use the kernels from here on, and launch them nowhere."""
    triton.runtime.driver.set_active(Driver())
    computing._TRITON_INTERPRETS = True  # or there would have to be a GPU
    set_hc_implementation("triton")


def measure(cases: list[str], repeats: int = REPEATS) -> dict[str, dict[str, float]]:
    """Return host milliseconds of a forward and a step, and launches of a step, for a connection of each case.

    Those of the plain model are for a sub-layer.
    """
    without_gpu()
    torch.set_flush_denormal(True)  # no kernel writes what is read here
    every = [calls(build(case)) for case in (PLAIN, *cases)]
    functions = [function for pair in every for function in pair]
    taken = medians_ms(functions, repeats, clock=time.thread_time)
    counted = [launches(step) for _, step in every]
    found = {}
    for k, case in enumerate((PLAIN, *cases)):
        row = dict(zip(FIGURES, (*taken[2 * k : 2 * k + 2], *counted[k]), strict=True))
        base = found.get(PLAIN)
        found[case] = row if base is None else {name: value - base[name] for name, value in row.items()}
    return {case: {name: value / SUB_LAYERS for name, value in row.items()} for case, row in found.items()}


def _medians(measured: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    return {
        case: {name: round(statistics.median(each[case][name] for each in measured), 3) for name in measured[0][case]}
        for case in measured[0]
    }


def _measured_in(checkout: Path) -> dict[str, dict[str, float]]:
    """Return a measurement of the package in a checkout, by this file."""
    command = [sys.executable, "-c", RUN, str(Path(__file__).resolve()), "--print", *KINDS, *PEERS]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"measuring {checkout} failed:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", metavar="CHECKOUT", type=Path, help="another checkout, measured in turn")
    parser.add_argument("--print", metavar="CASE", nargs="+", help="print one measurement of these and write nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.print:
        print(json.dumps(measure(arguments.print)))
        return
    checkouts = {"after": Path(__file__).resolve().parents[1]}
    if arguments.before is not None:
        checkouts["before"] = arguments.before.resolve()
    measured: dict[str, list] = {name: [] for name in checkouts}
    for _ in range(ROUNDS):
        for name, checkout in checkouts.items():
            measured[name].append(_measured_in(checkout))
    shape = {"layers": LAYERS, "hidden_size": SIZE, "tokens": TOKENS, "streams": STREAMS}
    write(file_name("host_time"), {**shape, **{name: _medians(every) for name, every in measured.items()}})


if __name__ == "__main__":
    main()
