"""The description on PyPI: the README, with links that lead to the repository, where its pages and pictures are."""

import re
from pathlib import Path

from setuptools import setup

HERE = Path(__file__).parent
REPOSITORY = "hf-hyperconn/hf_hyperconn"


def described() -> str:
    """The README of this release, without relative links, which PyPI doesn't resolve."""
    (version,) = re.findall(r'"(.+)"', (HERE / "hf_hyperconn" / "_version.py").read_text(encoding="utf-8"))
    pages, files = (
        f"https://github.com/{REPOSITORY}/blob/v{version}",
        f"https://github.com/{REPOSITORY}/raw/v{version}",
    )
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    readme = re.sub(r"(!\[[^]]*\]\()(?!https?:)", rf"\g<1>{files}/", readme)
    return re.sub(r"(?<!!)(\[[^]]*\]\()(?!https?:|#)", rf"\g<1>{pages}/", readme)


setup(long_description=described(), long_description_content_type="text/markdown")
