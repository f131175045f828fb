"""The notebook runs from its first cell to its last, offline and in fewer steps, and is kept without outputs."""

import json
import os
import re

import pytest

from .pages import REPOSITORY

NOTEBOOK = REPOSITORY / "examples" / "convert_and_train.ipynb"
STEPS, FEWER_STEPS = "STEPS, MORE_STEPS, LENGTH = 100, 30, 128", "STEPS, MORE_STEPS, LENGTH = 30, 10, 128"


def test_no_output_is_kept():
    for cell in json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.slow
def test_it_runs(tmp_path, monkeypatch):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for name, value in {"PYTHONPATH": str(REPOSITORY), "TMPDIR": str(tmp_path), "HF_HUB_OFFLINE": "1"}.items():
        monkeypatch.setitem(os.environ, name, value)
    text = NOTEBOOK.read_text(encoding="utf-8")
    assert STEPS in text
    notebook = nbformat.reads(text.replace(STEPS, FEWER_STEPS), as_version=4)
    nbclient.NotebookClient(notebook, timeout=500, resources={"metadata": {"path": tmp_path}}).execute()
    cells = {cell.id: cell.get("outputs", ()) for cell in notebook.cells}
    printed = {name: "".join(each.get("text", "") for each in outputs) for name, outputs in cells.items()}
    assert "equal to the base, bit for bit" in printed["convert"]
    assert "HCLlamaForCausalLM equals LlamaForCausalLM" in printed["verify"]
    losses = [float(loss) for loss in re.findall(r"(?:loss|then) ([\d.]+)", printed["train"])]
    assert losses[0] == losses[2]
    assert losses[1] < losses[0]
    assert losses[3] < losses[2]
    assert any("image/png" in each.get("data", {}) for each in cells["plot"])
    assert "the hyper-connections are trained" in printed["save"]
    assert "would push" in printed["push"]
    assert "model.safetensors" in printed["push"]
