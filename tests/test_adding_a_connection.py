"""docs/adding_a_connection.md, followed: its blocks make the connection, and its commands prove it."""

import re
import shutil
from pathlib import Path

import pytest

from hf_hyperconn.kinds import KINDS

from .followed import NOT_SOURCE, follow, run
from .marks import tail
from .pages import REPOSITORY, read

PAGE = read("docs/adding_a_connection.md")


@pytest.fixture
def place(tmp_path) -> Path:
    """A copy of the repository."""
    return shutil.copytree(REPOSITORY, tmp_path / "main", ignore=shutil.ignore_patterns(*NOT_SOURCE))


def test_the_blocks_apply_and_pass_the_linter(place):
    assert re.search(r'name, title, paper = "(\w+)"', PAGE)[1] not in KINDS
    commands = follow(PAGE, place)
    assert [command[:3] for command in commands] == [["python", "-m", "tests.record"], ["python", "-m", "pytest"]]
    for options in (["check"], ["format", "--check"]):
        done = run(["python", "-m", "ruff", *options, "."], place)
        assert done.returncode == 0, done.stdout


@pytest.mark.slow
@pytest.mark.tail
def test_the_commands_prove_the_connection(place):
    for command in follow(PAGE, place):
        done = run(command, place)
        assert done.returncode == 0, done.stdout
    assert int(re.search(r"(\d+) passed", done.stdout)[1]) > 10
    assert '`"gated"`' in (place / "docs" / "families.md").read_text(encoding="utf-8")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "test"),
    [
        ('{"gain": torch.ones(1, ', '{"gain": torch.zeros(1, ', "test_parameters_and_initial_values"),
        ("return streams.squeeze(-2), values,", "return streams.squeeze(-2), 2 * values,", "test_a_conversion_equals"),
        *tail(
            ("np.ones(1)", "np.zeros(1)", "test_parameters_and_initial_values"),
            ('return {"gain": (1,)}', 'return {"gain": (2,)}', "test_parameters_and_initial_values"),
        ),
    ],
    ids=["module", "equation", "row", "shape"],
)
def test_the_commands_find_a_wrong_block(right, wrong, test, place):
    assert PAGE.count(right) == 1
    *_, proof = follow(PAGE.replace(right, wrong), place)
    proof[proof.index("-k") + 1] = f"gated and {test}"  # one of those that the page selects
    done = run(proof, place)
    assert done.returncode == 1, done.stdout
    assert re.search(rf"FAILED .*::{test}", done.stdout), done.stdout
