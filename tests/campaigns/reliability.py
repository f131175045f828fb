"""The last figures of `make fuzz`, docs/reliability.json, and their tables in docs/reliability.md."""

import platform

import torch
import transformers

import hf_hyperconn
from benchmarks.timing import markdown

from .figures import Figures, named

NONE = "No figures yet."
OK, REFUSED, UNVERIFIED, FAILED = "ok", "refused", "verification failed", "failed"
OUTCOMES = (OK, REFUSED, UNVERIFIED, FAILED)


def write(part: str, figures: dict) -> None:
    """Replace a part of the figures, "cases", "signals" or "disks", and the page's tables."""
    versions = {
        **{"hf_hyperconn": hf_hyperconn.__version__, "transformers": transformers.__version__},
        **{"torch": torch.__version__, "python": platform.python_version()},
    }
    FIGURES.write({**FIGURES.read(), part: {"versions": versions, **figures}})


def tables(figures: dict) -> dict[str, str]:
    """Return a table for each part."""
    made = {"cases": _cases, "signals": _signals, "disks": _disks}
    return {part: _body(figures[part], table) if part in figures else NONE for part, table in made.items()}


def _body(figures: dict, table) -> str:
    seed = f"Seed {figures['seed']}. " if "seed" in figures else ""
    minutes = -(-figures["seconds"] // 60)
    return f"{seed}{minutes} minute{'s' * (minutes != 1)}; {named(figures['versions'])}.\n\n{table(figures['counts'])}"


def _cases(counts: dict) -> str:
    rows = [[f"`{driver}`", *(f"{of.get(outcome, 0):,}" for outcome in OUTCOMES)] for driver, of in counts.items()]
    sums = [f"{sum(of.get(outcome, 0) for of in counts.values()):,}" for outcome in OUTCOMES]
    return markdown(["", *OUTCOMES], [*rows, ["all", *sums]])


def _signals(counts: dict) -> str:
    head = ["", "signals", "before the end", "promises broken"]
    return markdown(
        head, [[name, *(f"{of[key]:,}" for key in ("sent", "cut", "failed"))] for name, of in counts.items()]
    )


def _disks(counts: dict) -> str:
    head = ["", "disks", "too small, or read-only", "promises broken"]
    return markdown(
        head, [[name, *(f"{of[key]:,}" for key in ("tried", "full", "failed"))] for name, of in counts.items()]
    )


FIGURES = Figures("docs/reliability.json", "docs/reliability.md", tables)
