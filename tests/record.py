"""Write down what tests compare the code with, for families that are new.

    python -m tests.record

That is the weight decay of each of their parameters, and the table of support in docs/families.md. Of weight decay,
what is recorded already stays. Read the diff: what is wrong there is wrong in the code.
"""

import json
import re
from pathlib import Path

from torch import nn

from benchmarks.timing import between_marks
from hf_hyperconn import convert_model, hc_param_groups

from .families import FAMILIES
from .pages import REPOSITORY
from .support import table
from .tiny import tiny

GOLDEN = Path(__file__).parent / "golden" / "weight_decay.json"


def decay_by_name(model: nn.Module) -> dict[str, float]:
    """Weight decay by parameter name, the same one of several layers once."""
    decays = {id(p): group["weight_decay"] for group in hc_param_groups(model, 1.0, 0.1) for p in group["params"]}
    found = {}
    for name, parameter in model.named_parameters():
        short = re.sub(r"\.\d+\.", ".*.", name)
        assert found.setdefault(short, decays[id(parameter)]) == decays[id(parameter)], name
    return found


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
