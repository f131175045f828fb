"""A program that can't import hf_hyperconn: compares converted folders with their bases, bit for bit.

    python tests/campaigns/releases/compare.py FOLDER

FOLDER has `<model type>/base` and `<model type>/dhc4`. Prints JSON: for each model type what became of it, and why.
"""

import json
import sys
from pathlib import Path

sys.modules["hf_hyperconn"] = None  # type: ignore[assignment]
sys.path.insert(0, str(Path(__file__).parents[2]))

import torch  # noqa: E402
from elsewhere import load, outputs  # noqa: E402
from model_inputs import kind_that_runs  # noqa: E402
from transformers.utils import logging  # noqa: E402

PROMPTS = [list(range(3, 12)), list(range(5, 10)), list(range(4, 21))]


def outcome(folder: Path) -> tuple[str, str]:
    """Return exact, refused, absent (the base doesn't run), differs or fails for a conversion, and why."""
    try:
        base = load(folder / "base", "float32", None, _module_of(folder))
        arguments = PROMPTS, 6, kind_that_runs(base, PROMPTS)
        expected = outputs(base, *arguments)
    except Exception as error:
        return "absent", _said(error)
    try:
        found = outputs(load(folder / "dhc4", "float32", None), *arguments)
    except ImportError as error:
        return "refused", _said(error)
    except Exception as error:
        return "fails", _said(error)
    differing = [
        name for name, value in expected.items() if not torch.equal(value, found.get(name, value.new_empty(0)))
    ]
    return ("differs", ", ".join(differing)) if differing else ("exact", "")


def _module_of(folder: Path) -> str:
    """Return the module of the base's class, which stands in the code of the conversion."""
    text = next((folder / "dhc4").glob("modeling_hc_*.py")).read_text(encoding="utf-8")
    return text.partition("from transformers.models.")[2].partition(" ")[0].join(["transformers.models.", ""])


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"[:300]


def main(place: str) -> None:
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    folders = sorted(path for path in Path(place).iterdir() if (path / "dhc4" / "config.json").is_file())
    print("\n" + json.dumps({folder.name: outcome(folder) for folder in folders}))


if __name__ == "__main__":
    main(*sys.argv[1:])
