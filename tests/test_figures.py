"""Pages show the last figures of the long runs, and these broke no promise."""

from importlib.metadata import requires

import pytest
from packaging.requirements import Requirement

from .campaigns import range as releases_of_others
from .campaigns import reliability, sweep
from .campaigns.engines import __main__ as engines
from .campaigns.releases import __main__ as releases
from .campaigns.trainers import page as trainers
from .campaigns.trainers.cases import CASES

RANGE = releases_of_others.RANGE


@pytest.mark.parametrize(
    "run", [engines, releases_of_others, releases, reliability, sweep, trainers], ids=lambda run: run.__name__
)
def test_the_page_has_the_last_figures(run):
    assert run.FIGURES.read()
    assert run.FIGURES.rendered() == run.FIGURES.written()


def test_no_engine_differed():
    rows = engines.FIGURES.read()["rows"]
    assert len(rows) > 50
    assert all(row["ok"] for row in rows)
    sharded = engines.FIGURES.written().count("| Llama, DHC×4, trained | tensor parallel, 2 | float32 |")
    assert sharded == 2  # vLLM's and SGLang's


def test_every_tool_did_what_the_page_says():
    rows = [(tool, row) for tool, found in trainers.FIGURES.read().items() for row in found["rows"]]
    assert all(row["ok"] for _, row in rows)
    assert {(tool, row["does"], row["verdict"]) for tool, row in rows} == {
        (case.tool, case.does, case.verdict) for case in CASES
    }


def test_the_range_begins_where_support_does():
    assert set(releases_of_others.FIGURES.read()) <= set(releases_of_others.RELEASES)
    supported = {
        requirement.name: requirement.specifier
        for requirement in map(Requirement, requires("hf_hyperconn"))
        if not requirement.marker
    }
    for package, versions in RANGE.items():
        assert list(supported[package].filter(versions)) == list(versions)
        (oldest,) = (specifier.version for specifier in supported[package] if specifier.operator == ">=")
        assert versions[0] in (oldest, f"{oldest}.0")


def test_folders_are_exact_or_refused_on_other_releases():
    for by_release in releases.FIGURES.read().values():
        for outcomes in by_release.values():
            failed = {name for kind, names in outcomes.items() if kind not in releases.ACCEPTED for name in names}
            assert failed <= {*releases.OTHER_BASE}
