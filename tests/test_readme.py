"""Every snippet of the README and of some pages runs, with a stand-in Hub that serves a tiny Llama."""

import json
import os
import re
import shlex
import subprocess
import sys

import pytest
from transformers import LlamaForCausalLM

from hf_hyperconn.conversion.demo import byte_tokenizer

from .conftest import llama_config
from .hub import Hub
from .pages import REPOSITORY, snippets

# snippets that run, at least
PAGES = {
    "README.md": {"bash": 2, "python": 4},
    "docs/analysis.md": {"bash": 2, "python": 1},
    "docs/peft.md": {"python": 3},
}
MODEL = "meta-llama/Llama-3.2-1B"


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment whose Hub serves a tiny model."""
    folder = tmp_path_factory.mktemp("hub")
    model = LlamaForCausalLM(llama_config(vocab_size=256, initializer_range=0.2))
    model.save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    with Hub() as hub:
        hub.push(MODEL, folder / "base")
        variables = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0"}
        yield {**variables, "PYTHONPATH": str(REPOSITORY), "HF_HUB_DISABLE_XET": "1"}


@pytest.mark.parametrize("page", PAGES)
def test_snippets_run_in_their_order(page, environment, tmp_path):
    place = {"cwd": tmp_path, "env": environment}
    (tmp_path / "article.txt").write_text("def read(self):\n    return self.value\n" * 50)
    ran = []
    for language, code in snippets(page):
        if language == "bash":
            commands = [shlex.split(line) for line in code.splitlines()]
            assert all(command.pop(0) == "hf-hyperconn" for command in commands)
            commands = [[sys.executable, "-m", "hf_hyperconn.conversion", *command] for command in commands]
        elif language == "python":
            commands = [[sys.executable, "-c", code]]
        else:
            continue
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **place)
            assert done.returncode == 0, f"{code}\n{done.stderr}"
        ran.append(language)
    for language, count in PAGES[page].items():
        assert ran.count(language) >= count


def test_the_two_commands_are_in_the_makefile():
    plain = "".join(code for language, code in snippets("README.md") if not language)
    makefile = (REPOSITORY / "Makefile").read_text(encoding="utf-8")
    targets = re.findall(r"^make (\w+)", plain, re.M)
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M)


def test_links_lead_somewhere():
    pages = [REPOSITORY / "README.md", *REPOSITORY.glob("docs/*.md"), REPOSITORY / "CONTRIBUTING.md"]
    for page in pages:
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_counts_of_transformers_own_tests_are_those_recorded():
    recorded = json.loads((REPOSITORY / "docs" / "transformers_suite.json").read_text(encoding="utf-8"))
    text = (REPOSITORY / "README.md").read_text(encoding="utf-8")
    (release,) = re.findall(r"On Transformers ([\d.]+):\n", text)
    rows = re.findall(r"^\| (HC\w+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.M)
    counts = {name: dict(zip(("passed", "failed", "skipped"), map(int, row), strict=True)) for name, *row in rows}
    assert counts == recorded[release]
