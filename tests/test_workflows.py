"""The workflows of `.github` run what the repository has, on the releases that it supports."""

import re
import subprocess

import pytest
import yaml

from hf_hyperconn import __version__

from .campaigns.range import RANGE
from .pages import REPOSITORY, read

WORKFLOWS = sorted(path.relative_to(REPOSITORY).as_posix() for path in REPOSITORY.glob(".github/workflows/*.yml"))


def jobs(workflow: str) -> dict[str, dict]:
    return yaml.safe_load(read(workflow))["jobs"]


def run(job: dict, start: str, place, **variables: str) -> int:
    """The exit status of the step of a job whose command starts so."""
    (command,) = (step["run"] for step in job["steps"] if step.get("run", "").startswith(start))
    return subprocess.run(["bash", "-e", "-c", command], cwd=place, env=variables).returncode


@pytest.mark.parametrize("workflow", WORKFLOWS)
def test_commands_are_there(workflow):
    makefile = read("Makefile")
    for job in jobs(workflow).values():
        for step in job.get("steps", ()):
            for target in re.findall(r"^make ([\w-]+)", step.get("run", ""), re.MULTILINE):
                assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_tests_run_on_what_is_supported():
    matrix = jobs(".github/workflows/tests.yml")["fast"]["strategy"]["matrix"]
    project = pytest.importorskip("tomllib").loads(read("pyproject.toml"))["project"]
    assert matrix["python"] == re.findall(r"Python :: (3\.\d+)", str(project["classifiers"]))
    assert project["requires-python"] == f">={matrix['python'][0]}"
    assert matrix["transformers"] == [RANGE["transformers"][0], "newest"]


def test_another_release_is_pinned_as_asked_for(tmp_path):
    steps = jobs(".github/workflows/tests.yml")
    for job, expected in (("fast", ["transformers==5.16.1"]), ("latest", [])):
        (tmp_path / "constraints.txt").write_text(read("constraints.txt"))
        assert run(steps[job], "sed", tmp_path, RELEASE="5.16.1") == 0
        lines = (tmp_path / "constraints.txt").read_text().splitlines()
        assert sorted({line for line in lines if line.startswith("transformers")}) == expected
        assert any(line.startswith("torch==") for line in lines)


def test_a_tag_of_another_version_is_not_released(tmp_path):
    build = jobs(".github/workflows/release.yml")["build"]
    (tmp_path / "dist").mkdir()
    (tmp_path / "dist" / f"hf_hyperconn-{__version__}.tar.gz").touch()
    assert run(build, "test", tmp_path, GITHUB_REF_NAME=f"v{__version__}") == 0
    assert run(build, "test", tmp_path, GITHUB_REF_NAME=f"v{__version__}.1") == 1
