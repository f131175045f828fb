"""The notebook runs from its first cell to its last, offline and in fewer steps, and shows the outputs of a whole run.

    python -m tests.test_notebook

runs it whole and keeps its outputs, without progress bars and warnings, which are of the machine.
"""

import os
import re
from tempfile import TemporaryDirectory

import pytest

from .pages import REPOSITORY

nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")

NOTEBOOK = REPOSITORY / "examples" / "convert_and_train.ipynb"
STEPS, FEWER_STEPS = "STEPS, MORE_STEPS, LENGTH = 100, 100, 128", "STEPS, MORE_STEPS, LENGTH = 30, 10, 128"


def executed(text: str, folder: str):
    """Return the notebook of a text, run in a folder."""
    notebook = nbformat.reads(text, as_version=4)
    nbclient.NotebookClient(notebook, timeout=900, resources={"metadata": {"path": folder}}).execute()
    return notebook


def outputs(notebook) -> dict[str, list]:
    return {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}


def is_of_the_machine(output) -> bool:
    return output.get("name") == "stderr" or "text/html" in output.get("data", {})


def check(notebook) -> None:
    """What a reader is told to see is in the outputs."""
    printed = {name: "".join(each.get("text", "") for each in found) for name, found in outputs(notebook).items()}
    assert "equal to the base, bit for bit" in printed["convert"]
    assert "HCLlamaForCausalLM equals LlamaForCausalLM" in printed["verify"]
    losses = [float(loss) for loss in re.findall(r"(?:loss|then) ([\d.]+)", printed["train"])]
    assert losses[0] == losses[2]
    assert losses[1] < losses[0]
    assert losses[3] < losses[2]
    assert any("image/png" in each.get("data", {}) for each in outputs(notebook)["plot"])
    assert "the hyper-connections are trained" in printed["save"]
    assert "the hyper-connections are trained" in printed["push"]


def test_the_outputs_of_a_whole_run_are_kept():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    check(notebook)
    kept = str(outputs(notebook))
    assert "stderr" not in kept
    assert not re.search(r"/(home|root|tmp|usr|work)/", kept)


@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    for name, value in {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert STEPS in text
    check(executed(text.replace(STEPS, FEWER_STEPS), tmp_path))


if __name__ == "__main__":
    os.environ |= {"PYTHONPATH": str(REPOSITORY), "HF_HUB_OFFLINE": "1"}
    with TemporaryDirectory() as place:
        whole = executed(NOTEBOOK.read_text(encoding="utf-8"), place)
    for cell in whole.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = [each for each in cell.outputs if not is_of_the_machine(each)]
    nbformat.write(whole, NOTEBOOK)
