"""How far a conversion is from its base: every connection, width and dtype, on a pretrained Llama.

    python -m benchmarks.connections_exactness CHECKPOINT TEXT

CHECKPOINT is a folder with a Llama and its tokenizer, TEXT a text file. Writes
benchmarks/results/connections_exactness.json and the table of docs/connections.md.
"""

import json
import platform
import re
import sys
from pathlib import Path

import torch
import transformers
from transformers import AutoTokenizer, LlamaForCausalLM

from hf_hyperconn import HCLlamaForCausalLM

REPOSITORY = Path(__file__).resolve().parents[1]
RESULT = REPOSITORY / "benchmarks" / "results" / "connections_exactness.json"
DOCS = REPOSITORY / "docs" / "connections.md"
WIDTHS = (2, 4, 8)
CASES = {
    **{
        f"{name}×{n}": {"connection": name, "hc_mult": n}
        for name in ("shc", "dhc", "mhc", "ihc", "frac")
        for n in WIDTHS
    },
    **{f"dhc×{n}, history": {"connection": "dhc", "hc_mult": n, "hc_start": "history"} for n in WIDTHS},
    **{f"attnres, block {block}": {"connection": "attnres", "hc_block": block} for block in (1, 2, 4)},
    **{f"altup×{n}": {"connection": "altup", "hc_mult": n} for n in WIDTHS},
    "skip": {"connection": "skip"},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
ROWS, LENGTH, NEW_TOKENS = 4, 48, 100


@torch.no_grad()
def measure(checkpoint: str, ids: torch.Tensor) -> list[dict]:
    """Return a row for each case and dtype."""
    rows = []
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    for dtype in DTYPES:
        base = LlamaForCausalLM.from_pretrained(checkpoint, dtype=dtype).eval()
        logits, continuation = base(ids).logits, base.generate(ids, **settings)
        for name, fields in CASES.items():
            model = HCLlamaForCausalLM.from_prenorm(checkpoint, **fields, dtype=dtype).eval()
            rows.append(
                {
                    "case": name,
                    "connection": fields["connection"],
                    "dtype": str(dtype).removeprefix("torch."),
                    "max_difference": (model(ids).logits - logits).abs().max().item(),
                    "greedy_equal": torch.equal(model.generate(ids, **settings), continuation),
                }
            )
    return rows


def table(rows: list[dict]) -> str:
    """Return Markdown: a line for each case."""
    dtypes = [str(dtype).removeprefix("torch.") for dtype in DTYPES]
    lines = ["| | " + " | ".join(dtypes) + " | greedy continuation |", "|---|" + "---|" * (len(dtypes) + 1)]
    for name in CASES:
        mine = [row for row in rows if row["case"] == name]
        cells = [f"{row['max_difference']:.2g}" for row in mine]
        equal = "equal" if all(row["greedy_equal"] for row in mine) else "differs"
        lines.append(f"| {name} | {' | '.join(cells)} | {equal} |")
    return "\n".join(lines)


def main() -> None:
    checkpoint, text = sys.argv[1:]
    ids = AutoTokenizer.from_pretrained(checkpoint)(Path(text).read_text(encoding="utf-8")[:20000])["input_ids"]
    rows = measure(checkpoint, torch.tensor(ids[: ROWS * LENGTH]).view(ROWS, LENGTH))
    machine = {"device": "cpu", "processor": platform.machine(), "torch": torch.__version__}
    result = {**machine, "transformers": transformers.__version__, "new_tokens": NEW_TOKENS, "rows": rows}
    RESULT.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    text = re.sub(
        r"EXACTNESS_TABLE|^\| \| float32.*?(?=\n\n)", table(rows), DOCS.read_text("utf-8"), flags=re.M | re.S
    )
    DOCS.write_text(text, encoding="utf-8")
    print(table(rows))


if __name__ == "__main__":
    main()
