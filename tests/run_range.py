"""Run the whole suite on the oldest and the newest supported Transformers, and write down what came of it.

Usage: python tests/run_range.py RESULT.md
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[1]
RANGE = {"oldest": "transformers==5.16.1", "newest": "transformers>=5.16.1,<6"}
VERSIONS = "from importlib.metadata import version as v; print(v('transformers'), v('huggingface_hub'), v('torch'))"


def run_suite(requirement: str, folder: Path) -> tuple[list[str], int, str]:
    """Versions, exit code and pytest's closing line in a fresh virtual environment with `requirement`."""
    constraints = folder / "constraints.txt"
    pins = (REPOSITORY / "constraints.txt").read_text(encoding="utf-8").splitlines()
    constraints.write_text("\n".join([pin for pin in pins if not pin.startswith("transformers")] + [requirement]))
    subprocess.run([sys.executable, "-m", "venv", folder / "venv"], check=True)
    python = folder / "venv" / "bin" / "python"
    install = [
        python,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--constraint",
        constraints,
        "--editable",
        f"{REPOSITORY}[dev]",
    ]
    subprocess.run(install, check=True)
    versions = subprocess.run([python, "-c", VERSIONS], check=True, capture_output=True, text=True).stdout.split()
    lines = []
    with subprocess.Popen([python, "-m", "pytest", "-q"], cwd=REPOSITORY, stdout=subprocess.PIPE, text=True) as suite:
        for line in suite.stdout:
            print(line, end="", flush=True)
            lines.append(line)
    return versions, suite.returncode, re.sub(r" in .*", "", lines[-1].strip())


def main(result: Path) -> int:
    """Run both ends of the range, write the table and return the worse exit code."""
    rows, worst = [], 0
    for end, requirement in RANGE.items():
        with tempfile.TemporaryDirectory() as folder:
            versions, code, summary = run_suite(requirement, Path(folder))
        rows.append(f"| {end} | {' | '.join(versions)} | {summary} |")
        worst = max(worst, code)
    result.write_text(
        "# Compatibility\n\nThe whole suite, `make test-range`, on CPU:\n\n"
        "| | transformers | huggingface_hub | torch | result |\n|---|---|---|---|---|\n" + "\n".join(rows) + "\n",
        encoding="utf-8",
    )
    return worst


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
