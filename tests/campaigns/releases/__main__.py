"""Run folders of converted models on other releases of Transformers than they were made on, and record the results.

    python -m tests.campaigns.releases [--write] [--releases RELEASE ...] [--only MODEL_TYPE ...]

A tiny model of each model type whose code has branches cut from Transformers is converted on each release. On each of
the others it is compared with its base, in a process that can't import this package: logits, hidden states, greedy
tokens with a cache and without, bit for bit. A folder is exact or refused; anything else is a failure. `--write`
writes docs/releases.json and the table of docs/compatibility.md.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.timing import markdown
from tests.pages import REPOSITORY

from ..figures import Figures

RELEASES = ("5.16.1", "5.20.2", "5.24.0")
ACCEPTED = ("exact", "refused", "absent")  # absent: the other release has no such model, or can't run the base
# the base itself is loaded otherwise there: it makes the embedding of padding zero, which a conversion keeps
OTHER_BASE = ("kosmos-2", "kosmos_2_text_model")
HERE = Path(__file__).parent


def installed(release: str) -> Path:
    """Return a folder with a release of Transformers and what that requires, which stands before what is installed."""
    folder = REPOSITORY / "build" / "releases" / release
    if not (folder / "transformers").is_dir():
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--target", folder]
        subprocess.run([*pip, f"transformers=={release}"], check=True)
    return folder


def on_release(release: str, arguments: list[str], place: Path) -> dict:
    """Return the JSON that a program prints as its last line, on a release of Transformers."""
    path = os.pathsep.join(map(str, (installed(release), REPOSITORY)))
    environment = {
        **os.environ,
        "PYTHONPATH": path,
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        "HF_MODULES_CACHE": str(place / f"modules-{release}"),
    }
    command = [sys.executable, *arguments]
    done = subprocess.run(command, env=environment, cwd=place, stdout=subprocess.PIPE, text=True, check=True)
    return json.loads(done.stdout.strip().rpartition("\n")[2])


def matrix(releases: list[str], only: list[str]) -> dict[str, dict[str, dict[str, list[str]]]]:
    """Return the outcome of each model type, by the release that made it and the release that ran it."""
    record: dict = {}
    for made in releases:
        with TemporaryDirectory() as folder:
            place = Path(folder)
            on_release(made, ["-m", "tests.campaigns.releases.make", str(place), *only], REPOSITORY)
            for ran in releases:
                if ran != made:
                    record.setdefault(made, {})[ran] = on_release(ran, [str(HERE / "compare.py"), str(place)], place)
                    print(f"made on {made}, run on {ran}: {_counts(record[made][ran])}", flush=True)
    return record


def _by_kind(outcomes: dict[str, list[str]]) -> dict[str, list[str]]:
    """Return the model types of each outcome."""
    kinds = dict.fromkeys([*ACCEPTED, *(kind for kind, _ in outcomes.values())])
    return {kind: [name for name, (outcome, _) in outcomes.items() if outcome == kind] for kind in kinds}


def _counts(outcomes: dict[str, list[str]]) -> str:
    return ", ".join(f"{len(names)} {kind}" for kind, names in _by_kind(outcomes).items())


def tables(record: dict[str, dict[str, dict[str, list[str]]]]) -> dict[str, str]:
    """Return the table of exact and refused model types, by both releases."""
    rows = []
    for made, by_release in record.items():
        for ran, outcomes in by_release.items():
            refused = ", ".join(f"`{name}`" for name in outcomes["refused"]) or "none"
            rows.append([made, ran, f"{len(outcomes['exact'])}", f"{len(outcomes['absent'])}", refused])
    return {"releases": markdown(["made on", "run on", "exact", "not there", "refused"], rows)}


FIGURES = Figures("docs/releases.json", "docs/compatibility.md", tables)


def main() -> int:
    """Run, write on request, and return 1 when a folder is neither exact nor refused."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="into docs/releases.json and the page's table")
    parser.add_argument("--releases", nargs="+", default=list(RELEASES), metavar="RELEASE")
    parser.add_argument("--only", nargs="+", default=[], metavar="MODEL_TYPE")
    options = parser.parse_args()
    record = matrix(options.releases, options.only)
    failed = [
        f"{name}, made on {made} and run on {ran}: {kind}: {why}"
        for made, by_release in record.items()
        for ran, outcomes in by_release.items()
        for name, (kind, why) in outcomes.items()
        if kind not in ACCEPTED and name not in OTHER_BASE
    ]
    print("\n".join(failed))
    if options.write:
        by_kind = {made: {ran: _by_kind(outcomes) for ran, outcomes in runs.items()} for made, runs in record.items()}
        FIGURES.write(by_kind)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
