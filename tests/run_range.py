"""Run the fast tests on other releases of Transformers and torch than development uses, and record the results.

Usage: python tests/run_range.py [--write] [--tests TEST ...] [RELEASE ...]

A RELEASE is such as transformers==5.16.1; without any, every minor release of Transformers and of torch that is
supported. Each gets a virtual environment of its own, with all other packages as for development.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RECORD = REPOSITORY / "docs" / "compatibility.json"
PAGE = REPOSITORY / "docs" / "compatibility.md"
RANGE = {
    "transformers": ("5.16.1", "5.17.0", "5.18.0", "5.19.0", "5.20.2", "5.21.1", "5.22.2", "5.23.0"),
    "torch": ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
}
COLUMNS = ("transformers", "torch", "huggingface_hub")
OUTCOMES = ("passed", "failed", "skipped")
VERSIONS = f"from importlib.metadata import version; print(*map(version, {COLUMNS}))"


def run_tests(release: str, tests: list[str], folder: Path) -> dict:
    """Versions, and how many tests had which outcome, with `release` in a fresh virtual environment."""
    package = release.partition("==")[0]
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join([pin for pin in pins if not pin.startswith(f"{package}==")] + [release]))
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--constraint", constraints, "--editable", ".[dev]"]
    subprocess.run(pip, check=True, cwd=REPOSITORY)
    versions = subprocess.run([python, "-c", VERSIONS], check=True, capture_output=True, text=True).stdout.split()
    pytest = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "not slow", *tests]
    environment, lines = {**os.environ, "OMP_NUM_THREADS": "1"}, []
    with subprocess.Popen(pytest, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True) as suite:
        for line in suite.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    counts = dict.fromkeys(OUTCOMES, 0)
    counts |= {outcome: int(count) for count, outcome in re.findall(r"(\d+) (\w+)", lines[-1]) if outcome in counts}
    counts["failed"] += suite.returncode != 0 and not counts["failed"]  # it did not come to an end
    return {**dict(zip(COLUMNS, versions, strict=True)), **counts}


def table(record: dict[str, dict]) -> str:
    """Markdown of the releases in the record, those of Transformers first."""
    rows = ["| " + " | ".join((*COLUMNS, *OUTCOMES)) + " |", "|" + "---|" * (len(COLUMNS) + len(OUTCOMES))]
    for package, releases in RANGE.items():
        for release in releases:
            if (found := record.get(f"{package}=={release}")) is not None:
                rows.append("| " + " | ".join(f"{found[name]}" for name in (*COLUMNS, *OUTCOMES)) + " |")
    return "\n".join(rows)


def render(page: str, record: dict[str, dict]) -> str:
    """The page with its table made anew."""
    before, _, rest = page.partition("<!-- range -->\n")
    _, end, after = rest.partition("<!-- /range -->")
    return f"{before}<!-- range -->\n{table(record)}\n{end}{after}"


def main() -> int:
    """Run, write if that is asked for, and return 1 when a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/compatibility.json and the page's table")
    parser.add_argument("--tests", nargs="+", metavar="TEST", default=[], help="files of tests; all if none is given")
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="such as transformers==5.16.1")
    chosen = parser.parse_args()
    if chosen.write and chosen.tests:
        parser.error("--write records a run of all tests")
    everything = [f"{package}=={release}" for package, releases in RANGE.items() for release in releases]
    failed = 0
    for release in chosen.releases or everything:
        with tempfile.TemporaryDirectory() as folder:
            found = run_tests(release, chosen.tests, Path(folder))
        print(f"{release}: {', '.join(f'{found[outcome]} {outcome}' for outcome in OUTCOMES)}", flush=True)
        failed += found["failed"]
        if chosen.write:
            record = json.loads(RECORD.read_text(encoding="utf-8")) | {release: found}
            RECORD.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n", encoding="utf-8")
            PAGE.write_text(render(PAGE.read_text(encoding="utf-8"), record), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
