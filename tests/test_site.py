"""The site that MkDocs makes of the README and of `docs/`."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import hf_hyperconn

from .pages import REPOSITORY, pages, read

pytest.importorskip("mkdocs", reason="needs the extra `docs`")
markdown_it = pytest.importorskip("markdown_it")

pytestmark = pytest.mark.slow

AT_THE_ROOT = ("CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
BLOCKS = ("h1", "h2", "h3", "li", "table", "td", "pre", "img")


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """The site, built as `make docs` builds it: a warning, such as for a link that leads nowhere, is an error."""
    folder = tmp_path_factory.mktemp("site")
    subprocess.run([sys.executable, "-m", "tests.stub"], cwd=REPOSITORY, check=True)  # the reference is read from it
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder


def article(site: Path, page: str) -> str:
    """What the site shows of a page, which is given by its path in the repository."""
    name = "index" if page == "README.md" else Path(page).stem.lower() if page in AT_THE_ROOT else Path(page).stem
    match = re.search(r"<article.*?</article>", (site / f"{name}.html").read_text(encoding="utf-8"), re.S)
    return match[0]


def blocks(html: str) -> dict[str, int]:
    return {name: len(re.findall(rf"<{name}[ >]", html)) for name in BLOCKS}


@pytest.mark.parametrize("page", [*pages(), *AT_THE_ROOT])
def test_a_page_has_the_blocks_that_github_shows(site, page):
    """Lists, tables and code that Python-Markdown reads in another way than GitHub would be text there."""
    rendered = markdown_it.MarkdownIt("gfm-like", {"linkify": False}).render(read(page))
    assert blocks(article(site, page)) == blocks(rendered)


@pytest.mark.parametrize("page", [*pages(), *AT_THE_ROOT])
def test_a_link_to_a_page_is_named_by_its_title(site, page):
    assert not re.findall(r"<a [^>]*>[\w/]+\.md</a>", article(site, page))


def test_what_is_exported_stands_in_the_reference(site):
    reference = "".join(path.read_text(encoding="utf-8") for path in (site / "api").glob("*.html"))
    for name in set(hf_hyperconn.__all__) - {"__version__"}:
        assert re.search(rf'<h\d id="hf_hyperconn\.[\w.]*\b{name}"', reference), name
    assert "<li><code>hc_lr</code>: learning rate of the connections" in reference


def test_nothing_is_fetched_from_elsewhere(site):
    for path in site.rglob("*.html"):
        html = path.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|img|link)[^>]*(?:src|href)="(https?:[^"]*)"', html), path
        assert 'data-md-component="source"' not in html, "its script asks GitHub for stars"
