"""docs/adding_a_family.md: its snippet shows a family's file, and what it names is there."""

import re
from contextlib import redirect_stdout
from importlib import import_module
from io import StringIO

import pytest

from hf_hyperconn.families.modules import code_text
from hf_hyperconn.families.reading.branches import cut_branches

from .pages import REPOSITORY, read

PAGE = read("docs/adding_a_family.md")


def test_the_snippet_prints_the_file():
    (snippet,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    with redirect_stdout(StringIO()) as printed:
        exec(snippet, {})
    assert printed.getvalue() == code_text("modeling_hc_glm4.py") + "\n"


@pytest.mark.parametrize(("table", "file"), re.findall(r"`([A-Z_]+)` in `([\w/]+\.py)`", PAGE))
def test_the_tables_are_where_the_page_says(table, file):
    assert (REPOSITORY / file).is_file()
    assert hasattr(import_module(file.removesuffix(".py").replace("/", ".")), table)


def test_the_form_on_the_page_is_accepted():
    import ast

    (form,) = re.findall(r"```text\n(residual = .*?)```", PAGE, re.DOTALL)
    lines = [re.sub(r"^\.\.\..*", "hidden_states = self.branch(hidden_states)", line) for line in form.splitlines()]
    source = "def forward(self, hidden_states):\n" + "\n".join(
        f"    {line}".replace("X", "hidden_states") for line in lines
    )
    branches = cut_branches(ast.parse(source).body[0], source, "Layer").branches
    assert [branch.statements for branch in branches] == ["hidden_states = self.branch(hidden_states)"] * 2
