"""Estimates of memory and traffic of Llama-3.1-8B and its conversion on many GPUs, for docs/scale.md.

Usage: python -m benchmarks.scale

Nothing is measured. A parameter takes 16 bytes: float32 weight, gradient and two moments of AdamW. A rank sends in a
ring: each of W ranks sends (W - 1) / W of what is gathered or scattered, and twice that to sum for all.
"""

import re
from pathlib import Path

import torch

from benchmarks.estimates import LLAMA_8B, table
from benchmarks.timing import markdown, with_tables
from hf_hyperconn import HCLlamaForCausalLM
from hf_hyperconn.analysis.costs import kept_bytes
from hf_hyperconn.models.sub_layers import is_of_connection

PAGE = Path(__file__).parents[1] / "docs" / "scale.md"
TOKENS = 8192  # of a step: of a rank, or of eight ranks that share a model by TP or PP
WEIGHT, BRANCH = 4, 2  # bytes of a value: of weights and streams in float32, of a branch under autocast
STATE = 4 * WEIGHT


class Model:
    """The conversion, on the meta device: what its parameters and its activations take."""

    def __init__(self, streams: int, **fields):
        config = HCLlamaForCausalLM.config_class.from_prenorm(LLAMA_8B, hc_mult=streams, **fields)
        with torch.device("meta"):
            model = HCLlamaForCausalLM(config)
        sizes = {name: parameter.numel() for name, parameter in model.named_parameters()}
        connections = sum(size for name, size in sizes.items() if is_of_connection(name))
        self.streams, self.config = streams, config
        self.base = sum(sizes.values()) - connections
        self.all = sum(sizes.values()) if streams > 1 else self.base
        plan = model.tp_plan
        self.split = sum(size for name, size in sizes.items() if re.sub(r"\d+", "*", name.rpartition(".")[0]) in plan)

    def parameters(self, tensor_ranks: int = 1) -> float:
        """Return the parameters of a rank of so many that split the plan's matrices; connections are on each."""
        return self.split / tensor_ranks + self.all - self.split

    def largest_stage(self, stages: int) -> float:
        """Return the parameters of the first or last of so many stages, with the embedding or the head."""
        embedding = self.config.vocab_size * self.config.hidden_size
        return (self.all - 2 * embedding) / stages + embedding

    @property
    def hidden(self) -> int:
        """Values of one hidden state for all tokens."""
        return TOKENS * self.config.hidden_size

    def tensor_traffic(self, ranks: int) -> float:
        """Return bytes of all-reduced outputs of branches: two a layer, in each direction."""
        return 4 * self.config.num_hidden_layers * 2 * share(ranks) * BRANCH * self.hidden

    def stage_traffic(self) -> int:
        """Return bytes that a middle stage sends: streams to the next stage, and their gradient to the one before."""
        return 2 * WEIGHT * self.streams * self.hidden


def share(ranks: int) -> float:
    return (ranks - 1) / ranks


def layouts(model: Model, ranks: int) -> dict[str, tuple[float, float]]:
    """Return parameters' and optimizer's bytes of a rank, and bytes that it sends in a step, by layout."""
    weights = WEIGHT * model.all
    reduced = 2 * share(ranks) * weights
    found = {
        "DeepSpeed ZeRO-1": (2 * weights + 2 * weights / ranks, reduced),
        "DeepSpeed ZeRO-2": (weights + 3 * weights / ranks, reduced),
        "FSDP2, ZeRO-3": (STATE * model.all / ranks, 3 * share(ranks) * weights),
    }
    copies = ranks // 8
    split, stage = model.parameters(8), model.largest_stage(8)
    of_split, of_stage = (2 * share(copies) * WEIGHT * each for each in (split, stage))
    suffix = f", DDP {copies}" if copies > 1 else ""
    found[f"TP 8{suffix}"] = STATE * split, model.tensor_traffic(8) + of_split
    found[f"PP 8{suffix}"] = STATE * stage, model.stage_traffic() + of_stage
    return found


def gigabytes(number: float) -> str:
    return f"{number / 1e9:.1f}"


def tables() -> dict[str, str]:
    """Return the tables of the page, by name."""
    plain, ours = Model(1), Model(4)
    rows = [
        [str(ranks), layout, *map(gigabytes, (base[0], model[0], base[1], model[1]))]
        for ranks in (8, 64)
        for (layout, base), model in zip(layouts(plain, ranks).items(), layouts(ours, ranks).values(), strict=True)
    ]
    head = ("GPUs", "layout", "state: base", "DHC×4", "sent in a step: base", "DHC×4")
    activations = []
    for name, model in (
        ("DHC×2", Model(2)),
        ("DHC×4", ours),
        ("DHC×8", Model(8)),
        ("SHC×4", Model(4, connection="shc")),
        ("mHC×4", Model(4, connection="mhc")),
    ):
        layers, added = model.config.num_hidden_layers, model.streams - 1
        config = model.config.to_dict()
        sizes = (
            *(TOKENS * kept_bytes(config, size) for size in (WEIGHT, BRANCH)),
            WEIGHT * layers * added * model.hidden,
            2 * WEIGHT * added * model.hidden,
        )
        activations.append([name, f"{(model.all - model.base) / 1e6:.3f}", *map(gigabytes, sizes)])
    columns = (
        "parameters, millions",
        "kept, float32 streams",
        "kept, bfloat16",
        "kept, checkpointed",
        "sent by a stage",
    )
    return {
        "scale": markdown(head, rows),
        "streams": markdown(("added by", *columns), activations),
        "estimates": table(),
    }


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(encoding="utf-8"), tables()), encoding="utf-8")
