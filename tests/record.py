"""Write down what tests compare the code with, for families that are new.

    python -m tests.record

That is the weight decay of each of their parameters, and the table of docs/families.md: which families take which
connections. Recorded weight decay stays. Read the diff: a mistake there is one of the code.
"""

import json
import re
from pathlib import Path

from torch import nn

from benchmarks.timing import RESULTS, between_marks
from hf_hyperconn import convert_model, hc_param_groups
from hf_hyperconn.kinds import CONVERTIBLE
from hf_hyperconn.models.connection_fields import CHOICES

from .families import FAMILIES
from .pages import REPOSITORY, read
from .tiny import tiny

GOLDEN = Path(__file__).parent / "golden" / "weight_decay.json"
FROM_SCRATCH = "from scratch"
NOT_MEASURED = "not measured"  # by benchmarks/connections_exactness.py
HEADS = {
    "ForCausalLM": "causal LM",
    "ForSequenceClassification": "sequence classification",
    "ForTokenClassification": "token classification",
    "ForQuestionAnswering": "question answering",
}


def decay_by_name(model: nn.Module) -> dict[str, float]:
    """Return weight decay by parameter name, the same one of several layers once."""
    decays = {id(p): group["weight_decay"] for group in hc_param_groups(model, 1.0, 0.1) for p in group["params"]}
    by_name = {}
    for name, parameter in model.named_parameters():
        short = re.sub(r"\.\d+\.", ".*.", name)
        assert by_name.setdefault(short, decays[id(parameter)]) == decays[id(parameter)], name
    return by_name


def listed() -> list[str]:
    """Return model types that docs/families.md lists without a row of their own."""
    return re.findall(r"`([\w-]+)`", section("Tested families").partition("And these:")[2].partition("\n\n")[0])


def section(heading: str) -> str:
    """Return a section of docs/families.md."""
    return read("docs/families.md").partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def answers() -> dict[str, list[str]]:
    """Return connections and norms, as they stand in a config, by the exactness of a conversion to them."""
    rows = json.loads((RESULTS / "connections_exactness.json").read_text(encoding="utf-8"))["rows"]
    dtypes = list(dict.fromkeys(row["dtype"] for row in rows))
    connections: dict[str, list[str]] = {}
    for connection in CHOICES["connection"]:
        measured = [row for row in rows if row["connection"] == connection]
        inexact = {row["dtype"] for row in measured if row["max_difference"]}
        exact = "exact" if not inexact else f"exact in {', '.join(name for name in dtypes if name not in inexact)}"
        answer = (exact if measured else NOT_MEASURED) if connection in CONVERTIBLE else FROM_SCRATCH
        connections.setdefault(answer, []).append(f'`"{connection}"`')
    connections[FROM_SCRATCH] += [f'`norm="{norm}"`' for norm in CHOICES["norm"] if norm is not None]
    return connections


def table() -> str:
    """Return Markdown: families with the same heads in a row, connections with the same answer in a column."""
    columns = answers()
    lines = ["| families | heads | " + " | ".join(map(", ".join, columns.values())) + " |"]
    lines.append("|---" * (len(columns) + 2) + "|")
    by_heads: dict[tuple[str, ...], list[str]] = {}
    for family in FAMILIES.values():
        by_heads.setdefault(tuple(family.heads)[1:], []).append(family.name)
    for heads, names in by_heads.items():
        cells = [", ".join(names), ", ".join(HEADS[head] for head in heads), *columns]
        lines.append("| " + " | ".join(cells) + " |")
    others = [f"[{len(listed())} others](#tested-families)", "the base's", *columns]
    lines.append("| " + " | ".join(others) + " |")
    return "\n".join(lines)


def main() -> None:
    recorded = json.loads(GOLDEN.read_text(encoding="utf-8"))
    families = recorded["families"]
    for model_type in FAMILIES.keys() - families.keys():
        families[model_type] = decay_by_name(convert_model(tiny(model_type)))
    recorded["families"] = {model_type: families[model_type] for model_type in FAMILIES}
    GOLDEN.write_text(json.dumps(recorded, indent=1) + "\n", encoding="utf-8")
    page = REPOSITORY / "docs" / "families.md"
    page.write_text(between_marks(page.read_text(encoding="utf-8"), "support", table()), encoding="utf-8")


if __name__ == "__main__":
    main()
