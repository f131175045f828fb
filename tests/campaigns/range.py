"""Run the fast tests on other releases of Transformers and torch than development uses, and record the results.

Usage: python -m tests.campaigns.range [--write] [--shared] [--tests TEST ...] [RELEASE ...]

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
from .environments import share
from .figures import Figures

RANGE = {
    "transformers": ("5.16.1", "5.17.0", "5.18.0", "5.19.0", "5.20.2", "5.21.1", "5.22.2", "5.23.0", "5.24.0"),
    "torch": ("2.10.0", "2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0"),
}
RELEASES = [f"{package}=={release}" for package, releases in RANGE.items() for release in releases]
COLUMNS = ("transformers", "torch", "huggingface_hub")
OUTCOMES = ("passed", "failed", "skipped")
VERSIONS = f"from importlib.metadata import version; print(*map(version, {COLUMNS}))"


def install(release: str, folder: Path) -> Path:
    """Return the Python of a new virtual environment with a release and all that development installs."""
    package = release.partition("==")[0]
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints = folder / "constraints.txt"
    constraints.write_text("\n".join([pin for pin in pins if not pin.startswith(f"{package}==")] + [release]))
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    # what is imported is compiled then, a small part
    pip = [python, "-m", "pip", "install", "--quiet", "--no-compile", "--constraint", constraints]
    subprocess.run([*pip, "--editable", ".[dev]"], check=True, cwd=REPOSITORY)
    return python


def install_shared(release: str, folder: Path) -> Path:
    """Return the Python of a new virtual environment with a release, which finds all else where this one does."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    share(folder / "venv")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--quiet", "--no-compile"]
    for arguments in ([release], ["--no-deps", "--no-build-isolation", "--editable", "."]):
        subprocess.run([*pip, *arguments], check=True, cwd=REPOSITORY)
    return python


def run_tests(python: Path, tests: list[str]) -> dict:
    """Return versions, and the number of tests by outcome, in an environment."""
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
    """Return the table, with a row for each release in the record, those of Transformers first."""
    columns = (*COLUMNS, *OUTCOMES)
    rows = [[f"{record[release][name]}" for name in columns] for release in RELEASES if release in record]
    return {"range": markdown(columns, rows)}


FIGURES = Figures("docs/compatibility.json", "docs/compatibility.md", tables)


def main() -> int:
    """Run the tests on each release, write on request, and return 1 when a test failed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/compatibility.json and the page's table")
    parser.add_argument("--shared", action="store_true", help="install the release alone beside what is here")
    parser.add_argument("--tests", nargs="+", metavar="TEST", default=[], help="files of tests; all if none is given")
    parser.add_argument("releases", nargs="*", metavar="RELEASE", help="such as transformers==5.16.1")
    options = parser.parse_args()
    if options.write and (options.tests or options.shared):
        parser.error("--write records a run of all tests in an environment of its own")
    failed = 0
    for release in options.releases or RELEASES:
        with tempfile.TemporaryDirectory() as folder:
            python = (install_shared if options.shared else install)(release, Path(folder))
            row = run_tests(python, options.tests)
        print(f"{release}: {', '.join(f'{row[outcome]} {outcome}' for outcome in OUTCOMES)}", flush=True)
        failed += row["failed"]
        if options.write:
            FIGURES.write({**FIGURES.read(), release: row})
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
