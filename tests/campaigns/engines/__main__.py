"""Serve converted folders with vLLM and SGLang on a CPU; compare with Transformers, and with the base in each engine.

    python -m tests.campaigns.engines                  all cases; exits with 1 when one differs
    python -m tests.campaigns.engines --only Qwen3     or --only SGLang
    python -m tests.campaigns.engines --write          also writes docs/engines.json and the tables of docs/serving.md

Each engine has a virtual environment of its own in build, without this package; making both takes ten minutes and
9 GB.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

import torch

from benchmarks.timing import markdown
from tests.campaigns.figures import Figures, named
from tests.tolerances import ENGINE_LOGPROBS, ROUNDED_AS_THE_BASE

from .cases import CASES, Case
from .environments import ENGINES
from .models import ADAPTER, BLOCK, NEW_TOKENS, build, expected, prompts

SECONDS = 600


def serve(case: Case, folder: Path, place: Path) -> dict:
    """Return two rounds of answers of the engine, and versions; or `error`, the last lines it printed."""
    job = {
        "folder": str(folder),
        "dtype": case.dtype,
        "options": case.options,
        "prompts": prompts(),
        "new_tokens": NEW_TOKENS,
        "adapter": str(folder / ADAPTER) if case.has_adapter else None,
    }
    (place / "job.json").write_text(json.dumps(job), encoding="utf-8")
    engine = ENGINES[case.engine]
    script = Path(__file__).with_name(f"{engine.script}_{'server' if case.by_server else 'offline'}.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {**engine.variables, "HF_MODULES_CACHE": str(place / "modules"), "HF_HUB_OFFLINE": "1"}
    if case.has_two_processes:
        environment[engine.cores] = "0|1"
    answer = place / "answer.json"
    answer.unlink(missing_ok=True)
    with (place / "log").open("w+", encoding="utf-8") as log:
        command = [engine.python(), script, place / "job.json", answer]
        process = subprocess.Popen(command, cwd=place, stdout=log, stderr=log, env=environment, start_new_session=True)
        try:
            with suppress(subprocess.TimeoutExpired):
                process.wait(SECONDS)
        finally:
            with suppress(ProcessLookupError):  # an engine's workers may outlive what started them
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        log.seek(0)
        printed = log.read()
    return json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {"error": printed[-20000:]}


def distance(
    answers: list[dict], tokens: list[list[int]], log_probabilities: list[torch.Tensor]
) -> tuple[bool, float]:
    """Return whether all tokens are the expected ones, and how far log-probabilities are off, as long as they are."""
    same, most = True, 0.0
    for answer, ids, expected_ones in zip(answers, tokens, log_probabilities, strict=True):
        for i, likely in enumerate(answer["logprobs"]):
            most = max(most, *(abs(value - expected_ones[i, int(token)].item()) for token, value in likely.items()))
            if answer["tokens"][i] != ids[i]:
                same = False
                break
    return same, most


def judge(case: Case, served: dict, folder: Path, of_bases: dict[tuple[str, str, str], dict]) -> dict:
    """Return a row of the table: what was compared, and whether it was as it should be."""
    row = {"engine": case.engine, "base": case.base, "connection": case.connection, "trained": case.is_trained}
    row |= {"dtype": case.dtype, "does": case.does}
    if "error" in served:
        return {**row, "ok": False, "error": served["error"]}
    once, again = served["answers"]
    row["cached"] = sum(answer["cached"] or 0 for answer in again)
    tokens, log_probabilities = expected(folder, case.has_adapter)
    distances = [distance(answers, tokens, log_probabilities) for answers in (once, again)]
    row["tokens"], row["distance"] = all(same for same, _ in distances), max(most for _, most in distances)
    key = case.engine, case.base, case.dtype
    if case.connection is None:
        of_bases[key] = {"answers": served["answers"], "distance": row["distance"]}
    elif key in of_bases and not case.is_trained and not case.does:
        row["equal_to_base"] = of_bases[key]["answers"] == served["answers"]
    if case.dtype == "float32":
        is_near = row["tokens"] and row["distance"] <= ENGINE_LOGPROBS["atol"]
    else:
        is_near = key not in of_bases or row["distance"] <= ROUNDED_AS_THE_BASE * of_bases[key]["distance"]
    is_cached = case.by_server or row["cached"] >= BLOCK * sum(len(prompt) > BLOCK for prompt in prompts())
    return {**row, "ok": is_near and is_cached and row.get("equal_to_base", True)}


def tables(figures: dict) -> dict[str, str]:
    """Return a table for each engine."""
    head = ["", "", "dtype", "answers", "log-probabilities, distance from `generate` in float32"]
    sections = {}
    for engine, versions in figures["versions"].items():
        table = markdown(head, [_row(row) for row in figures["rows"] if row["engine"] == engine])
        sections[engine] = f"{named(versions)}.\n\n{table}"
    return sections


def _row(row: dict) -> list[str]:
    name = f"{row['base']}, {row['connection'] or 'the base itself'}{', trained' * row['trained']}"
    if "error" in row:
        return [name, row["does"], row["dtype"], "none", ""]
    answers = "same as `generate`" if row["tokens"] else "differ by rounding"
    if "equal_to_base" in row:
        answers = "the base's, bit for bit" if row["equal_to_base"] else "different from the base's"
    return [name, row["does"], row["dtype"], answers, f"within {row['distance']:.1g}"]


FIGURES = Figures("docs/engines.json", "docs/serving.md", tables)


def main() -> int:
    """Run the cases, print their rows, and write them when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose name holds this")
    parser.add_argument("--write", action="store_true", help="write docs/engines.json and docs/serving.md")
    options = parser.parse_args()
    if options.write and options.only:
        parser.error("--write records a run of everything")
    torch.set_num_threads(1)
    rows, of_bases, versions, start = [], {}, {}, time.monotonic()
    with tempfile.TemporaryDirectory(prefix="hf_hyperconn_engines_") as temporary:
        place = Path(temporary).resolve()
        for case in CASES:
            if options.only not in f"{case.engine} {case.name} {case.does}":
                continue
            folder = build(case, place)
            served = serve(case, folder, place)
            versions.setdefault(case.engine, {}).update(served.get("versions", {}))
            row = judge(case, served, folder, of_bases)
            rows.append(row)
            result = row.get("error") or f"tokens {row['tokens']}, distance {row['distance']:.1g}"
            name = f"{case.engine} {case.name} {case.dtype} {case.does}"
            print(f"{'ok    ' if row['ok'] else 'FAILED'} {name}: {result}", flush=True)
    if options.write:
        FIGURES.write({"versions": versions, "seconds": round(time.monotonic() - start), "rows": rows})
    return not all(row["ok"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
