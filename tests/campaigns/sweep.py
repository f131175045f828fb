"""Convert a tiny model of every model type of the installed Transformers, or say why that can't be done.

    python -m tests.campaigns.sweep [--write] [MODEL_TYPE ...]

Each is made by the rule of `other_families.py`, converted on the command line, loaded by a process that can't import
this package and compared with its base, bit for bit, in float32 and bfloat16: logits, hidden states and, where it
generates, greedy tokens. So is one for each `--stack` that a model type has besides the usual ones. `--write` writes
docs/model_types.json and the tables of docs/model_types.md; of given model types, what became of them.
"""

import argparse
import json
import os
import re
import resource
import subprocess
import sys
from collections import Counter, defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import transformers
from huggingface_hub.utils import tqdm

from hf_hyperconn.conversion import cli
from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.families.family import find_family, name_of_family
from hf_hyperconn.families.reading.classes import FamilyName
from hf_hyperconn.families.reading.read_family import fields_of_stacks
from hf_hyperconn.families.reading.source_files import table

from .. import other_families
from ..families import FAMILIES
from ..test_families import compared
from ..tiny import tiny
from .figures import Figures

MEMORY = 9 * 2**30  # bytes: some configs stay large whatever is asked of them
SECONDS = 600
AT_ONCE = 8  # model types that share a process
TITLES = {
    "exact": "converted, saved, loaded without this package, equal to the base bit for bit",
    "not compared": "of a form that converts; no tiny model, or no input for it, is made by the rule",
    "refused": "refused, with a reason",
    "no model": "no model of its own behind `AutoModel`",
}


def outcomes(model_types: list[str]) -> dict[str, tuple[str, str]]:
    """Return the outcome of each model type, one of `TITLES`, and why.

    Models are made in a process of their own, and in two when that does not end well.
    """
    refusals = {model_type: refusal for model_type in model_types if (refusal := refused(model_type)) is not None}
    left = [model_type for model_type in model_types if model_type not in refusals]
    if not left:
        return refusals
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    with TemporaryDirectory() as place:
        command = [sys.executable, "-m", "tests.campaigns.sweep", "--here", place, *left]
        try:
            process = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, env=environment)
            failure = f"its process ended with {process.returncode}" if process.returncode else ""
        except subprocess.TimeoutExpired:
            failure = f"not done after {SECONDS} s"
    if not failure:
        printed = json.loads(process.stdout.strip().rpartition("\n")[2])
        return refusals | {name: tuple(outcome) for name, outcome in printed.items()}
    if len(left) == 1:
        return refusals | {left[0]: ("not compared", failure)}
    half = len(left) // 2
    return refusals | outcomes(left[:half]) | outcomes(left[half:])


def refused(model_type: str) -> tuple[str, str] | None:
    """Return why a model type has no form that converts; None for one that has."""
    try:
        find_family(model_type)
    except UnsupportedCheckpointError as error:
        has_model = not re.match(r"Transformers \S+ has no base model of|\S+ defines no", str(error))
        return ("refused", str(error)) if has_model else ("no model", "")
    return None


def outcomes_here(model_types: list[str], place: Path) -> dict[str, tuple[str, str]]:
    """Return the outcome of a tiny model of each family."""
    failures = {name: failure for name in model_types if (failure := converted(name, place)) is not None}
    left = [name for name in model_types if name not in failures]
    try:
        differing = compared(place, left, new_tokens=8)
    except AssertionError as error:
        if len(left) == 1:
            return failures | {left[0]: ("not compared", f"its forward: {_first_line(error)}")}
        raise
    differ = {name: any(differing[case] for case in differing if case.startswith(f"{place / name}/")) for name in left}
    return failures | {
        name: ("refused", "another result than its base's") if differ[name] else ("exact", "") for name in left
    }


def converted(model_type: str, place: Path) -> tuple[str, str] | None:
    """Make, save and convert a tiny model. Return what prevents it, if anything does."""
    try:
        base = (tiny if model_type in FAMILIES else other_families.tiny)(model_type)
        base.save_pretrained(place / model_type / "base")
    except (Exception, pytest.skip.Exception) as error:
        return "not compared", f"the tiny model: {_first_line(error)}"
    arguments, stack = [str(place / model_type / name) for name in ("base", "dhc4")], FamilyName.of(model_type).stack
    arguments += [] if stack is None else ["--stack", stack]
    said = StringIO()
    with redirect_stderr(said):
        failed = cli.main(["convert", *arguments, "-q", "--verify", "structure"])
    return ("not compared", f"`hf-hyperconn convert`: {_first_line(said.getvalue())}") if failed else None


def stacks_of(model_type: str) -> list[str]:
    """Return the names of families that `--stack` makes of a model type, besides its usual ones."""
    names = (name_of_family({"model_type": model_type}, stack) for stack in fields_of_stacks(model_type))
    return [name for name in names if name != model_type]


def tables(record: dict) -> dict[str, str]:
    """Return all of the page that is made of the record."""
    outcomes, stacks = record["outcomes"], record["stacks"]
    counts, counts_of_stacks = (Counter(kind for kind, _ in found.values()) for found in (outcomes, stacks))
    exact = defaultdict(list)
    for name, (kind, _) in stacks.items():
        if kind == "exact":
            exact[FamilyName.of(name).own].append(f"`{FamilyName.of(name).stack}`")
    lines = [
        f"Transformers {record['transformers']} has {len(outcomes)} model types:",
        "",
        "| outcome | count | meaning |",
        "|---|---|---|",
        *(f"| {kind} | {counts[kind]} | {title} |" for kind, title in TITLES.items()),
        "",
        f"`--stack` has {len(stacks)} other choices: {counts_of_stacks['exact']} are exact, "
        f"{counts_of_stacks['not compared']} were not compared, and {counts_of_stacks['refused']} are refused.",
        "",
        "| model type | outcome | exact by `--stack` | reason |",
        "|---|---|---|---|",
        *(
            f"| `{model_type}` | {kind} | {', '.join(exact[model_type])} | {_reason(why)} |"
            for model_type, (kind, why) in outcomes.items()
        ),
    ]
    return {"sweep": "\n".join(lines)}


def _reason(why: str) -> str:
    """Return a reason without the names of classes."""
    if match := re.search(r"added to the residual stream: (.*)\. So hyper-connections", why):
        return f"the layer: {match[1]}"
    why = re.sub(r"^\w+ has a language model that can't be converted: ", "", why)
    why = re.sub(r"^the forward of \w+ ", "the model ", why.partition(", so ")[0])
    return re.sub(r"([|\[])", r"\\\1", re.sub(r"^\w+ has no list", "the model has no list", why))


def _first_line(error: BaseException | str) -> str:
    text = str(error).strip() or type(error).__name__
    return re.sub(r"/\S+/", "", text.splitlines()[-1 if "Traceback" in text else 0])[:120]


FIGURES = Figures("docs/model_types.json", "docs/model_types.md", tables)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/model_types.json and .md")
    parser.add_argument("--here", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("model_types", nargs="*")
    options = parser.parse_args()
    if options.here:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        print("\n" + json.dumps(outcomes_here(options.model_types, options.here)))
        return
    own = sorted(table("CONFIG_MAPPING_NAMES"))
    model_types = options.model_types or [*own, *(name for model_type in own for name in stacks_of(model_type))]
    chunks = [model_types[i : i + AT_ONCE] for i in range(0, len(model_types), AT_ONCE)]
    found: dict[str, tuple[str, str]] = {}
    with ThreadPoolExecutor(2) as pool:
        for chunk in tqdm(pool.map(outcomes, chunks), total=len(chunks), unit="chunk"):
            found |= chunk
    if not options.write:
        print(json.dumps(found, indent=1))
        return
    record = FIGURES.read() if options.model_types else {"outcomes": {}, "stacks": {}}
    for name in model_types:
        record["outcomes" if FamilyName.of(name).stack is None else "stacks"][name] = found[name]
    in_order = {
        part: dict(sorted(record[part].items(), key=lambda item: FamilyName.of(item[0]).own))
        for part in ("outcomes", "stacks")
    }
    FIGURES.write({"transformers": transformers.__version__, **in_order})


if __name__ == "__main__":
    main()
