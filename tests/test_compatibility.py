"""The page of compatibility says what was recorded."""

from importlib.metadata import requires

from packaging.requirements import Requirement

from .campaigns.range import FIGURES, RANGE
from .campaigns.releases.__main__ import ACCEPTED, OTHER_BASE
from .campaigns.releases.__main__ import FIGURES as RELEASES


def test_the_page_has_the_recorded_table():
    record = FIGURES.read()
    assert record
    assert FIGURES.rendered() == FIGURES.written()
    assert set(record) <= {f"{package}=={release}" for package, releases in RANGE.items() for release in releases}


def test_the_range_begins_where_support_does():
    supported = {each.name: each.specifier for each in map(Requirement, requires("hf_hyperconn")) if not each.marker}
    for package, releases in RANGE.items():
        assert list(supported[package].filter(releases)) == list(releases)
        (oldest,) = (each.version for each in supported[package] if each.operator == ">=")
        assert releases[0] in (oldest, f"{oldest}.0")


def test_the_page_has_what_became_of_folders_on_other_releases():
    record = RELEASES.read()
    assert record
    assert RELEASES.rendered() == RELEASES.written()
    for by_release in record.values():
        for found in by_release.values():
            others = {name for kind, names in found.items() if kind not in ACCEPTED for name in names}
            assert others <= {*OTHER_BASE}
