"""The call that the Transformers backends of vLLM and SGLang make."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModel, LlamaForCausalLM

from hf_hyperconn import convert_model
from hf_hyperconn.conversion.convert import convert_checkpoint

from .conftest import llama_config, randomise_connections
from .tiny import tiny
from .tolerances import ENGINE

MIXTURES = ["olmoe", "qwen3_moe", "mixtral"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """Conversions of a tiny model of some families, and a trained one."""
    place = tmp_path_factory.mktemp("engine")
    found = {}
    for family in ("llama", *MIXTURES):
        tiny(family).save_pretrained(place / family)
        found[family] = convert_checkpoint(str(place / family), place / f"hc {family}", verify="off").path
    found["trained"] = place / "trained"
    randomise_connections(convert_model(copy.deepcopy(tiny("llama")))).save_pretrained(found["trained"])
    return found


@pytest.fixture(scope="module")
def called(folders, tmp_path_factory) -> dict[tuple[str, str], tuple[torch.Tensor, int]]:
    """What an engine's call returns of each folder, and how often it called experts."""
    place = tmp_path_factory.mktemp("called")
    cases = [(name, dtype) for name in folders for dtype in ("float32", "bfloat16")]
    job = {
        "cases": [(str(folders[name]), dtype) for name, dtype in cases],
        "ids": list(range(3, 10)),  # no longer than the families' windows
        "result": str(place / "result"),
    }
    subprocess.run(
        [sys.executable, Path(__file__).with_name("engine.py")],
        input=json.dumps(job),
        text=True,
        check=True,
        env={**os.environ, "HF_MODULES_CACHE": str(place / "modules"), "PYTHONPATH": ""},
    )
    return dict(zip(cases, torch.load(place / "result"), strict=True))


def hidden_states(folder: Path, dtype: str) -> torch.Tensor:
    with torch.no_grad():
        return AutoModel.from_pretrained(folder, dtype=dtype)(torch.arange(3, 10)[None]).last_hidden_state[0]


@pytest.mark.parametrize("family", ["llama", *MIXTURES])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_engine_gets_what_the_base_gives(family, dtype, folders, called):
    """Although it keeps hyper-connections in the dtype of the model: zeros, ones and 0.01 times nothing."""
    found, calls = called[family, dtype]
    assert torch.equal(found, hidden_states(folders[family].with_name(family), dtype))
    config = tiny(family).config
    dense = getattr(config, "mlp_only_layers", None) or []
    assert calls == (config.num_hidden_layers - len(dense) if family in MIXTURES else 0)


def test_an_engine_gets_what_the_trained_model_gives(folders, called):
    found, _ = called["trained", "float32"]
    expected = hidden_states(folders["trained"], "float32")
    torch.testing.assert_close(found, expected, **ENGINE)
    assert not torch.allclose(expected, hidden_states(folders["llama"], "float32"), atol=0.1)


def test_a_stage_of_a_pipeline_is_refused():
    """vLLM cuts a model in stages even when it has no plan for that, and puts such layers where others were."""

    class MissingLayer(torch.nn.Module):
        def forward(self, hidden_states, **kwargs):
            return hidden_states

    stage = convert_model(LlamaForCausalLM(llama_config())).model
    stage.layers[0] = MissingLayer()
    with pytest.raises(ValueError, match=r"layer 1 received hidden states of shape \(2, 24, 32\).*tensor parallelism"):
        stage(inputs_embeds=torch.zeros(2, 24, 32))
