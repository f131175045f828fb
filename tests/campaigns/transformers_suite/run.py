"""Run Transformers' own tests of its models on the hyper-connection models, and check the counts written down.
A test that fails is run again on the family itself, which tells Transformers' own failures.

Usage: python tests/campaigns/transformers_suite/run.py [--write] [--control] [--only EXPRESSION] [FAMILY ...]

The tests come from the source distribution of the installed Transformers, fetched once with pip into `build/`. That
distribution lacks some of the modules its tests import; ours in `standins/` take their place. Exits with 1 when a test
fails or when fewer tests pass than `docs/transformers_suite.json` says for this version.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from importlib.metadata import version
from pathlib import Path

SUITE = Path(__file__).resolve().parent
REPOSITORY = SUITE.parents[2]
CACHE = REPOSITORY / "build"
RECORD = REPOSITORY / "docs" / "transformers_suite.json"
OF_BASE = "failed by the base, too"
OUTCOMES = ("passed", "failed", OF_BASE, "skipped")
PROCESSES = ("-n", "2", "--dist", "loadscope")


def fetch_tests(release: str) -> Path:
    """Return the folder with the `tests` package of a Transformers release, which is fetched once."""
    folder = CACHE / f"transformers-{release}"
    if not folder.is_dir():
        CACHE.mkdir(exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as temporary:
            pip = [sys.executable, "-m", "pip", "download", "--quiet", "--dest", temporary]
            source = ["--no-deps", "--no-binary", ":all:", "--no-build-isolation", f"transformers=={release}"]
            subprocess.run([*pip, *source], check=True)
            (archive,) = Path(temporary).glob("*.tar.gz")
            with tarfile.open(archive) as distribution:
                tests = [name for name in distribution.getnames() if name.startswith(f"{folder.name}/tests/")]
                if hasattr(tarfile, "data_filter"):  # from Python 3.11.4 on
                    distribution.extraction_filter = tarfile.data_filter
                distribution.extractall(temporary, [distribution.getmember(name) for name in tests])
            (Path(temporary) / folder.name).rename(folder)
    (folder / "tests" / "__init__.py").write_text(f"__path__.append({str(SUITE / 'standins')!r})\n", encoding="utf-8")
    return folder


def run_tests(folder: Path, tests: list[str], only: str = "", *, control: bool = False) -> tuple[int, dict[str, str]]:
    """Return pytest's exit code, and the outcome of each test by its node id.

    only: as for pytest -k. control: on the families themselves.
    """
    environment = {
        **os.environ,
        "PYTHONPATH": str(folder),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",  # the models are too small for more to help
        "CUDA_VISIBLE_DEVICES": "",  # with a GPU in sight, Transformers skips the tests of several processes
        "TRANSFORMERS_SUITE_CONTROL": "1" if control else "",
    }
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "outcomes.json"
        pytest = [sys.executable, "-m", "pytest", "--config-file", "pytest.ini", "--outcomes", path, *PROCESSES]
        code = subprocess.run([*pytest, *tests, "-k", only], cwd=SUITE, env=environment).returncode
        return code, json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


def failed(outcomes: dict[str, str]) -> list[str]:
    return [nodeid for nodeid, outcome in outcomes.items() if outcome == "failed"]


def count(outcomes: dict[str, str], *, control: bool) -> dict[str, dict[str, int]]:
    """Return the number of tests by model and outcome."""
    counts: dict[str, dict[str, int]] = {}
    for nodeid, outcome in outcomes.items():
        model = nodeid.split("::")[1].removesuffix("ModelTest").removeprefix("HC" if control else "")
        counts.setdefault(model, dict.fromkeys(OUTCOMES, 0))[outcome] += 1
    return counts


def shortfalls(counts: dict[str, dict[str, int]], recorded: dict[str, dict[str, int]]) -> list[str]:
    """Return a line for every model of which fewer tests passed than `recorded`."""
    passed = {model: counts[model]["passed"] if model in counts else 0 for model in recorded}
    return [
        f"{model}: {passed[model]} tests passed, {RECORD.name} says {recorded[model]['passed']}. "
        f"Find out why; run with --write if that is right."
        for model in recorded
        if passed[model] < recorded[model]["passed"]
    ]


def main() -> int:
    """Run, print the table, compare or write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help=f"write the counts to {RECORD.relative_to(REPOSITORY)}")
    parser.add_argument("--control", action="store_true", help="run the same tests on the families themselves")
    parser.add_argument("--only", metavar="EXPRESSION", help="the tests to run, as for pytest -k")
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="such as Llama; all of them if none is given")
    options = parser.parse_args()
    if options.write and (options.control or options.only or options.families):
        parser.error("--write records a run of everything")

    release = version("transformers")
    folder = fetch_tests(release)
    tests = [f"test_families.py::HC{family}ModelTest" for family in options.families] or ["test_families.py"]
    code, outcomes = run_tests(folder, tests, options.only or "", control=options.control)
    if not options.control and (ours := failed(outcomes)):
        of_base = failed(run_tests(folder, ours, control=True)[1])
        outcomes |= dict.fromkeys(of_base, OF_BASE)
        code = 0 if code == 1 and set(of_base) == set(ours) else code
    counts = count(outcomes, control=options.control)
    print(f"\nTransformers {release}'s own tests{' on its own models' if options.control else ''}")
    for model, row in counts.items():
        print(f"  {model:<12}" + "".join(f"{row[outcome]:>5} {outcome}" for outcome in OUTCOMES))

    record = json.loads(RECORD.read_text(encoding="utf-8")) if RECORD.exists() else {}
    fewer = []
    if options.write and code == 0:
        RECORD.write_text(json.dumps({**record, release: counts}, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    elif not options.write and not options.control and not options.only:
        recorded = record.get(release, {})
        ran = [f"HC{family}" for family in options.families] or list(recorded)
        fewer = shortfalls(counts, {model: recorded[model] for model in ran if model in recorded})
    for line in fewer:
        print(line, file=sys.stderr)
    return 1 if code or fewer else 0


if __name__ == "__main__":
    sys.exit(main())
