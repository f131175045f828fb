"""Run the fast tests on other releases of Transformers and torch than development uses, and record the results.

Usage: python -m tests.campaigns.range [--write] [--tests TEST ...] [RELEASE ...]

A RELEASE is such as transformers==5.16.1; without any, every minor release of Transformers and of torch that is
supported. Each gets a virtual environment of its own, with all other packages as for development.
"""

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.timing import markdown

from ..pages import REPOSITORY
from .figures import Figures

RANGE = {
    "transformers": ("5.16.1", "5.17.0", "5.18.0", "5.19.0", "5.20.2", "5.21.1", "5.22.2", "5.23.0", "5.24.0"),
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
    # what is imported is compiled then, a small part
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--constraint", constraints]
    subprocess.run([*pip, "--editable", ".[dev]"], check=True, cwd=REPOSITORY)
    versions = subprocess.run([python, "-c", VERSIONS], check=True, capture_output=True, text=True).stdout.split()
    pytest = [python, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-m", "not slow", *tests]
    environment, lines = {**os.environ, "OMP_NUM_THREADS": "1"}, []
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    with subprocess.Popen(pytest, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True) as suite:
        for line in suite.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    counts = dict.fromkeys(OUTCOMES, 0)
    counts |= {outcome: int(count) for count, outcome in re.findall(r"(\d+) (\w+)", lines[-1]) if outcome in counts}
    counts["failed"] += suite.returncode != 0 and not counts["failed"]  # it did not come to an end
    return {**dict(zip(COLUMNS, versions, strict=True)), **counts}


def tables(record: dict[str, dict]) -> dict[str, str]:
    """One, with a row for each release in the record, those of Transformers first."""
    everything = [f"{package}=={release}" for package, releases in RANGE.items() for release in releases]
    columns = (*COLUMNS, *OUTCOMES)
    rows = [[f"{record[release][name]}" for name in columns] for release in everything if release in record]
    return {"range": markdown(columns, rows)}


FIGURES = Figures("docs/compatibility.json", "docs/compatibility.md", tables)


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
            FIGURES.write({**FIGURES.read(), release: found})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
