"""Train a tiny Llama and its conversion by the tools that people use, on a CPU; compare the two.

    python -m tests.campaigns.trainers                  all cases; exits with 1 when one is not as it should be
    python -m tests.campaigns.trainers --only TRL       or --only GRPO
    python -m tests.campaigns.trainers --write          also writes docs/trainers.json and docs/trainers.md's tables

Each tool has a virtual environment of its own in build, without this package, which takes from development's what the
tool's pins allow.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import torch

from .cases import CASES, Case
from .compare import Runs
from .page import FIGURES


def record(case: Case, row: dict) -> None:
    """Put a row in the place of the last one of its case; rows of cases that are no more are left out."""
    figures = FIGURES.read()
    rows = {(tool, old["does"]): old for tool, found in figures.items() for old in found["rows"]}
    versions = {tool: found["versions"] for tool, found in figures.items()}
    versions[case.tool] = versions.get(case.tool, {}) | row.pop("versions")
    if row["ok"]:
        del row["found"]
    rows[case.tool, case.does] = row
    ordered = {}
    for tool, does in ((case.tool, case.does) for case in CASES):
        if (tool, does) in rows:
            ordered.setdefault(tool, {"versions": versions[tool], "rows": []})["rows"].append(rows[tool, does])
    FIGURES.write(ordered)


def main() -> int:
    """Run the cases, print their rows, and write them when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=[""], metavar="TEXT", help="cases whose tool or name holds one")
    parser.add_argument("--write", action="store_true", help="write docs/trainers.json and docs/trainers.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    all_ok = True
    with tempfile.TemporaryDirectory(prefix="hf_hyperconn_trainers_") as temporary:
        runs = Runs(Path(temporary).resolve())
        for case in CASES:
            if not any(text in f"{case.tool}: {case.does}" for text in options.only):
                continue
            row = runs.compare(case)
            all_ok &= row["ok"]
            print(f"{'ok    ' if row['ok'] else 'FAILED'} {case.tool}: {case.does}: {row['found']}", flush=True)
            if options.write:
                record(case, row)
        runs.close()
    return not all_ok


if __name__ == "__main__":
    sys.exit(main())
