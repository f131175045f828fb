"""What a type checker makes of programs that use the package."""

import re
import shutil

import pytest

from .pages import REPOSITORY
from .stub import stub

api = pytest.importorskip("mypy.api")

pytestmark = pytest.mark.slow

PROGRAM = """
import torch
from transformers import LlamaForCausalLM

from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM, HCTrainer, convert_model, hc_param_groups, save_hc
from hf_hyperconn.training.monitor import hc_figures

config = HCLlamaConfig(hidden_size=64, hc_mult=4, connection="dhc")
reveal_type(config.hc_mult)
reveal_type(config.hidden_size)
model = HCLlamaForCausalLM(config)
reveal_type(HCLlamaForCausalLM.from_pretrained("folder"))
reveal_type(HCLlamaForCausalLM.from_prenorm("base", hc_mult=4))
reveal_type(convert_model(LlamaForCausalLM.from_pretrained("base"), hc_mult=4))
reveal_type(save_hc(model, "file.safetensors"))
reveal_type(hc_figures(model, torch.tensor([[1]])))
torch.optim.AdamW(hc_param_groups(model, lr=1e-4, weight_decay=0.1))
HCTrainer(model, hc_lr=1e-3)
"""
MISTAKES = """
convert_model(model, hc_mult="four")
convert_model(model, connection="dch")
HCLlamaConfig(hc_start="begin")
freeze = HCLlamaForCausalLM.from_base
"""
LLAMA = "transformers.models.llama.modeling_llama.LlamaForCausalLM"
REVEALED = [
    *("int", "int", *["hf_hyperconn.HCLlamaForCausalLM"] * 2, LLAMA),
    *("pathlib.Path", "dict[str, float]"),
]


def check(program: str, place) -> str:
    """What mypy says of a program, of itself alone."""
    (place / "program.py").write_text(program)
    settings = ("--config-file=", f"--cache-dir={place / 'cache'}", "--follow-imports=silent")
    said, errors, _ = api.run([*settings, "--ignore-missing-imports", str(place / "program.py")])
    assert not errors
    return said


@pytest.mark.tail
def test_programs_are_typed(tmp_path, monkeypatch):
    package = shutil.copytree(REPOSITORY / "hf_hyperconn", tmp_path / "packages" / "hf_hyperconn")
    (package / "__init__.pyi").write_text(stub())
    monkeypatch.setenv("MYPYPATH", str(package.parent))
    said = check(PROGRAM, tmp_path)
    assert re.findall(r'Revealed type is "([^"]+)"', said) == REVEALED
    assert "error:" not in said
    said = check(f"{PROGRAM}{MISTAKES}", tmp_path)
    assert said.count("error:") == len(MISTAKES.strip().splitlines())
