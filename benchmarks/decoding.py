"""Count the operations of one decoded token and time it, with each kind of connection, against the plain model.

    python -m benchmarks.decoding [--threads 1]

Models of eight layers, so small that what Python and the dispatcher do decides: eager and compiled, batch 1, after a
prompt of 64 tokens, all in turn in one process. Operations are what reaches PyTorch's dispatcher in eager mode. Writes
benchmarks/results/decoding.json (on a GPU decoding_cuda.json).
"""

import argparse
from collections.abc import Callable

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, StaticCache

from benchmarks.llamas import PLAIN, build
from benchmarks.timing import device, file_name, medians_ms, write

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 2752,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 512,
}
PROMPT, REPEATS = 64, 60
CASES = (PLAIN, "SHC×4", "DHC×4", "mHC×4", "attention residuals")
COMPILED = (PLAIN, "SHC×4", "DHC×4", "mHC×4")


class Counter(TorchDispatchMode):
    """Counts what reaches the dispatcher."""

    operations = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.operations += 1
        return function(*args, **(kwargs or {}))


def decoder(model: PreTrainedModel, compiled: bool) -> Callable[[], torch.Tensor]:
    """Return a function that decodes the token after a prompt, the same one in each call."""
    cache = StaticCache(config=model.config, max_cache_len=PROMPT + 1)
    model(torch.arange(PROMPT, device=device())[None], past_key_values=cache)
    token, place = torch.tensor([[5]], device=device()), torch.tensor([[PROMPT]], device=device())
    mask = torch.ones(1, PROMPT + 1, dtype=torch.long, device=device())

    def decode() -> torch.Tensor:
        for layer in cache.layers:
            layer.cumulative_length.fill_(PROMPT)
        return run(input_ids=token, position_ids=place, attention_mask=mask, past_key_values=cache).logits

    run = torch.compile(model, fullgraph=True) if compiled else model
    return decode


def operations(decode: Callable[[], torch.Tensor]) -> int:
    with Counter() as counter:
        decode()
    return counter.operations


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    torch.set_num_threads(parser.parse_args().threads)
    connections = 2 * SHAPE["num_hidden_layers"]
    rows = {case: {"case": case} for case in CASES}
    eager = {case: decoder(build(SHAPE, case).eval(), compiled=False) for case in CASES}
    counts = {case: operations(decode) for case, decode in eager.items()}
    for case, row in rows.items():
        row["operations"] = counts[case]
        row["operations_a_connection"] = round((counts[case] - counts[PLAIN]) / connections, 1)
    compiled = {case: decoder(build(SHAPE, case).eval(), compiled=True) for case in COMPILED}
    for way, decoders in (("eager", eager), ("compiled", compiled)):
        taken = dict(zip(decoders, medians_ms(list(decoders.values()), REPEATS), strict=True))
        for case, milliseconds in taken.items():
            rows[case][way] = {"ms": round(milliseconds, 3), "ratio": round(milliseconds / taken[PLAIN], 3)}
    for row in rows.values():
        print(row, flush=True)
    write(file_name("decoding"), {"shape": SHAPE, "rows": list(rows.values())})


if __name__ == "__main__":
    main()
