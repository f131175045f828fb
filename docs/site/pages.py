"""A hook of MkDocs: pages of the repository that are not in `docs/`, and links that lead out of the site."""

import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

REPOSITORY = Path(__file__).resolve().parents[2]
# pages that stand at the root of the repository, and figures that benchmarks draw, by their place in the site
FROM_ELSEWHERE = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "CHANGELOG.md": "changelog.md",
    "benchmarks/results/connections.png": "figures/benchmark_connections.png",
    "benchmarks/results/continued_pretraining.png": "figures/benchmark_continued_pretraining.png",
}
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")
NAMED_BY_FILE = re.compile(r"\[[\w/]+\.md\](?=\(([^)#\s]+\.md))")
IMAGE = re.compile(r"(?<!\[)!\[[^\]]*\]\(([^)\s]+\.png)\)")
INTERVAL = re.compile(r"(?<=\d) ± (?=\d)")
ESCAPED = re.compile(r"`[^`\n|]*(?:\\\|[^`\n|]*)+`")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add what is not in `docs/`."""
    for path, place in FROM_ELSEWHERE.items():
        files.append(File.generated(config, place, abs_src_path=str(REPOSITORY / path)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Have links lead to the page of the site where there is one, and to the repository otherwise.

    A link whose text is a file's name gets the page's title. Strokes in the code of tables, which GitHub wants escaped
    and Python-Markdown does not, are made plain. A picture leads to its file, where it is as large as on GitHub. An
    interval stays on one line.
    """
    folder = Path(page.file.abs_src_path).resolve().parent
    depth = page.file.src_uri.count("/")

    def target(link: re.Match) -> str:
        path = Path(os.path.relpath(folder / link[1], REPOSITORY)).as_posix()
        if not (REPOSITORY / path).exists():
            return link[1]  # no link, or one that MkDocs then reports
        place = FROM_ELSEWHERE.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(place) is not None:
            return "../" * depth + place
        kind = "tree" if (REPOSITORY / path).is_dir() else "blob"
        return f"{config.extra['social'][0]['link']}/{kind}/main/{path}"

    def titled(link: re.Match) -> str:
        path = folder / link[1]
        title = re.search(r"^# (.+)", path.read_text(encoding="utf-8"), re.M) if path.exists() else None
        return f"[{title[1]}]" if title else link[0]

    markdown = LINK.sub(target, NAMED_BY_FILE.sub(titled, markdown))
    markdown = INTERVAL.sub("\u00a0±\u00a0", IMAGE.sub(r"[\g<0>](\1)", markdown))
    return ESCAPED.sub(lambda code: code[0].replace("\\|", "|"), markdown)
