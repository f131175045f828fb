"""What stands in several places of versions, and of where the project is."""

import pytest
import yaml

from hf_hyperconn import __version__
from hf_hyperconn.kinds import FORMAT

from .pages import read

PROJECT = pytest.importorskip("tomllib").loads(read("pyproject.toml"))["project"]


def test_the_citation_is_of_this_release():
    citation = yaml.safe_load(read("CITATION.cff"))
    assert citation["version"] == __version__
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == PROJECT["urls"]["Repository"]
    assert citation["url"] == PROJECT["urls"]["Documentation"]


def test_the_page_of_versions_says_the_format():
    assert f"The format is {FORMAT};" in read("docs/versions.md")


def test_the_site_links_to_the_repository():
    assert f"link: {PROJECT['urls']['Repository']}\n" in read("mkdocs.yml")
