"""The prose of the pages: no sentence over 30 words, and no phrase that hides its subject."""

import re

import pytest

from .pages import pages, read

MOST_WORDS = 30
HIDDEN_SUBJECTS = re.compile(r"\b(that of|those of|asked for)\b", re.I)
PAGES = [*pages(), "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"]
NO_PROSE = re.compile(r"^[ \t]*```.*?^[ \t]*```|^---$.*?^---$|<!--.*?-->|^\|[^\n]*$", re.M | re.S)
NEW_PARAGRAPH = re.compile(r"\n\s*\n|\n(?=\s*(?:[-*#]|\d+\.) )")


def sentences(text: str) -> list[str]:
    """Return the sentences outside code and tables. A word of code, and a list of such words, is one word."""
    found = []
    for paragraph in NEW_PARAGRAPH.split(NO_PROSE.sub("\n\n", text)):
        plain = re.sub(r"`[^`]*`", "code", " ".join(paragraph.split()))
        plain = re.sub(r"code(?:, code)+", "code", plain)
        plain = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", plain)
        found += re.split(r"(?<=[.!?])[)\"*]*\s+", plain)
    return found


def faults(text: str) -> list[str]:
    """Return the sentences that are too long, or have a hidden subject."""
    return [
        sentence
        for sentence in sentences(text)
        if len(re.findall(r"\S*\w\S*", sentence)) > MOST_WORDS or HIDDEN_SUBJECTS.search(sentence)
    ]


@pytest.mark.parametrize("page", PAGES)
def test_a_page_has_short_sentences_with_a_subject(page):
    assert faults(read(page)) == []


@pytest.mark.parametrize(
    ("text", "number"),
    [
        (f"{'word ' * 30}.\n\n{'word ' * 31}.", 1),
        (f"- {'word ' * 16}\n  {'word ' * 15}.\n- short", 1),
        ("Its loss is that of the base.", 1),
        (f"{'`code`, ' * 40}`code`.", 0),
        (f"```text\n{'word ' * 40}\n```\n| {'word ' * 40} |", 0),
    ],
)
def test_faults_are_found(text, number):
    assert len(faults(text)) == number
