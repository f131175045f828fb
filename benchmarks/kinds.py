"""Time every kind of connection in a whole stack, where what attention residuals read grows with the depth.

    python -m benchmarks.kinds [--threads 2]

Decoder layers of HCLlama whose branches return their input, so that connections and readout are all there is: forward
with backward in eager mode, and for some kinds compiled. Writes benchmarks/results/kinds.json (on a GPU
kinds_cuda.json): medians in milliseconds for one connection, ratios to DHC×4 run the same way, called in turn with
each kind, and what the backward keeps of all of them, in MiB.
"""

import argparse
from collections.abc import Callable, Sequence

import torch

from benchmarks.timing import device, file_name, keep_memory, medians_ms, write
from hf_hyperconn import HCLlamaConfig
from hf_hyperconn.models.modeling_hc_llama import HCLlamaModel

LAYERS = 12
TOKENS, SIZE = {"cpu": (512, 512), "cuda": (8192, 2048)}[device()]
REFERENCE = "DHC×4"
HISTORY = {"hc_start": "history", "hc_readout": "weighted"}
KINDS: dict[str, dict] = {
    "DHC×4": {},
    "DHC×4, history": HISTORY,
    "SHC×4": {"connection": "shc"},
    "SHC×4, history": {"connection": "shc", **HISTORY},
    "mHC×4": {"connection": "mhc"},
    "iHC×4": {"connection": "ihc"},
    "attention residuals, full": {"connection": "attnres", "hc_mult": 1},
    "attention residuals, blocks of 4": {"connection": "attnres", "hc_mult": 1, "hc_block": 4},
    "attention residuals, blocks of 8": {"connection": "attnres", "hc_mult": 1, "hc_block": 8},
    "AltUp×4": {"connection": "altup"},
    "ResiDual": {"connection": "dual", "hc_mult": 2},
    "Keel": {"connection": "keel", "hc_mult": 1},
}
COMPILED = (REFERENCE, *(name for name in KINDS if name.startswith("attention")))  # others take minutes to compile


def stack(fields: dict) -> Callable[[torch.Tensor], torch.Tensor]:
    """Connections and readout of a model, from embeddings `[1, S, D]` to hidden states `[1, S, D]`."""
    torch.manual_seed(0)
    config = HCLlamaConfig(
        hidden_size=SIZE, num_hidden_layers=LAYERS, intermediate_size=8, vocab_size=8, num_attention_heads=4, **fields
    )
    layers = HCLlamaModel(config).to(device()).layers
    for layer in layers:
        layer.attention_branch = layer.mlp_branch = lambda hidden_states, **kwargs: hidden_states
        with torch.no_grad():
            for name, parameter in layer.named_parameters():
                if "hc" in name:
                    parameter.add_(0.02 * torch.randn_like(parameter))

    def run(hidden_states: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            hidden_states = layer(hidden_states)
        return hidden_states

    return run


def call(function: Callable, dtype: torch.dtype) -> Callable[[], None]:
    """Return a forward with its backward."""
    inputs = torch.randn(1, TOKENS, SIZE, device=device()).to(dtype).requires_grad_()
    grad = torch.randn_like(inputs)

    def both() -> None:
        inputs.grad = None
        function(inputs).backward(grad)

    return both


def kept_mib(function: Callable, dtype: torch.dtype) -> float:
    """What the backward keeps, each storage once."""
    storages = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        function(torch.randn(1, TOKENS, SIZE, device=device()).to(dtype).requires_grad_())
    return sum(storage.nbytes() for storage in storages.values()) / 2**20


def compared(pair: Sequence[Callable], dtype: torch.dtype) -> dict[str, float]:
    """Return the time of one connection of a stack, and its ratio to that of the other."""
    taken, reference = medians_ms([call(function, dtype) for function in pair])
    return {"ms": round(taken / (2 * LAYERS), 3), "ratio": round(taken / reference, 3)}


def main() -> None:
    keep_memory()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=2)
    torch.set_num_threads(parser.parse_args().threads)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for name, fields in KINDS.items():
            row = {"case": name, "dtype": str(dtype)[6:], "kept_mib": round(kept_mib(stack(fields), dtype), 1)}
            pair = stack(fields), stack(KINDS[REFERENCE])
            row["eager"] = compared(pair, dtype)
            if name in COMPILED and dtype == torch.float32:
                torch.compiler.reset()
                row["compiled"] = compared([torch.compile(function, fullgraph=True) for function in pair], dtype)
            rows.append(row)
            print(row, flush=True)
    write(file_name("kinds"), {"shape": {"layers": LAYERS, "tokens": TOKENS, "hidden_size": SIZE}, "rows": rows})


if __name__ == "__main__":
    main()
