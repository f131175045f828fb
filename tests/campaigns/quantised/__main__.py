"""Quantise tiny Llamas and their conversions as docs/quantised.md says; compare them with what they were.

    python -m tests.campaigns.quantised             all schemes; exits with 1 when one fails
    python -m tests.campaigns.quantised --write     also writes docs/quantised.json and the table of docs/quantised.md

Each scheme runs the page's snippets: one process quantises and saves, another loads what was saved. Neither can import
this package. llmcompressor has a virtual environment of its own in build, 1.5 GB.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

from tests.processes import without_package
from tests.tolerances import QUANTISED_AS_THE_BASE

from .cases import FOLDER, LOAD, MODELS, NOISE, QUANTISED, SCHEMES, Scheme, build, snippet, token_ids
from .page import FIGURES

VERSIONS = "import sys; from importlib.metadata import version; print(*map(version, sys.argv[1:]))"


def run(python: Path, code: str, folders: list[Path], environment: dict[str, str], noise: float = 0.0) -> list[dict]:
    """What the code's model answers in each folder, from one process."""
    job = {"code": code, "folders": list(map(str, folders)), "ids": token_ids(), "noise": noise, "answer": "answer.pt"}
    place = folders[0].parent
    (place / "job.json").write_text(json.dumps(job), encoding="utf-8")
    command = [python, Path(__file__).with_name("job.py"), place / "job.json"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        raise RuntimeError(done.stderr[-5000:])
    return [torch.load(folder / job["answer"]) for folder in folders]


def distance(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative to what is expected."""
    return ((found - expected).norm() / expected.norm()).item()


def compare(quantised: dict, loaded: dict, plain: dict, connections: dict[str, torch.Tensor]) -> dict:
    """Of a quantised model: how far it is from the plain one, and whether what must not change didn't."""
    row = {"noise": distance(plain["noisy"], plain["logits"])}
    if "error" in loaded | quantised:
        return {**row, "error": (loaded | quantised)["error"]}
    row["distance"] = distance(quantised["logits"], plain["logits"])
    row["reloaded"] = torch.equal(loaded["logits"], quantised["logits"])
    if connections:
        row["connections"] = all(
            name in answer["parameters"] and torch.equal(answer["parameters"][name], value)
            for answer in (quantised, loaded)
            for name, value in connections.items()
        )
    return row


def judge(row: dict, base: dict | None) -> str:
    """What is wrong with a row, in words; nothing, when all is well. base: the row that it is compared with."""
    if "error" in row:
        return row["error"]
    if not row.get("connections", True):
        return "connections changed"
    if not row["reloaded"]:
        return "loaded again, it gives other logits"
    if not row.get("equal_to_base", True):
        return "a fresh conversion gives other logits than its base"
    if base is not None and "error" not in base:
        most = QUANTISED_AS_THE_BASE * base["distance"] * row["noise"] / base["noise"]
        if row["distance"] > most:
            return f"{row['distance']:.3f} away, where its base allows {most:.3f}"
    return ""


def measure(scheme: Scheme, folders: list[Path], environment: dict[str, str], plains: list[dict], kept: list) -> dict:
    """Return the row of each model. plains: the models' own answers. kept: their connections."""
    for folder in folders:
        shutil.rmtree(folder / QUANTISED, ignore_errors=True)
    quantised = run(scheme.python(), scheme.code, folders, environment)
    loaded = run(scheme.python(), snippet(LOAD), folders, environment)
    answers = dict(zip(MODELS, quantised, strict=True))
    rows = dict(zip(MODELS, map(compare, quantised, loaded, plains, kept), strict=True))
    for name, model in MODELS.items():
        if model.base is not None and not model.is_trained and "error" not in answers[name] | answers[model.base]:
            rows[name]["equal_to_base"] = torch.equal(answers[name]["logits"], answers[model.base]["logits"])
    return rows


def versions(python: Path, package: str) -> dict[str, str]:
    """Of a scheme's package, and of those that it runs on."""
    names = [package, *(["compressed-tensors"] if package == "llmcompressor" else []), "transformers", "torch"]
    done = subprocess.run([python, "-c", VERSIONS, *names], capture_output=True, text=True, check=True)
    return dict(zip(names, done.stdout.split(), strict=True))


def main() -> int:
    """Run the schemes, print their rows, and write them when asked to."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write docs/quantised.json and docs/quantised.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows, used, plains = [], {}, {}
    with tempfile.TemporaryDirectory(prefix="hf_hyperconn_quantised_") as temporary:
        place = Path(temporary).resolve()
        environment = {**without_package(place / "without"), "HF_HUB_OFFLINE": "1"}
        folders = [place / name for name in MODELS]
        kept = [build(model, folder / FOLDER) for model, folder in zip(MODELS.values(), folders, strict=True)]
        for name, scheme in SCHEMES.items():
            python = scheme.python()
            if python not in plains:
                plains[python] = run(python, snippet(LOAD).replace(QUANTISED, FOLDER), folders, environment, NOISE)
            used[scheme.package] = versions(python, scheme.package)
            measured = measure(scheme, folders, environment, plains[python], kept)
            for model, row in measured.items():
                wrong = judge(row, measured.get(MODELS[model].base))
                rows.append({"scheme": name, "model": model, **row, "ok": not wrong})
                print(f"FAILED {name}, {model}: {wrong}" if wrong else f"ok     {name}, {model}", flush=True)
    if options.write:
        FIGURES.write({"versions": used, "rows": rows})
    return not all(row["ok"] for row in rows)


if __name__ == "__main__":
    sys.exit(main())
