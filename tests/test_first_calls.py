"""The first calls of a new user: names that completion finds, help, and a base that is given to from_pretrained."""

import subprocess
import sys
from inspect import getdoc

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_hyperconn
from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM, HCLlamaForSequenceClassification, HyperConnectionConfig
from hf_hyperconn.families.family import LISTED_FAMILIES, find_family
from hf_hyperconn.models.connection_fields import FIELDS

from .conftest import llama_config
from .pages import REPOSITORY


def test_import_leaves_models_to_those_who_need_them():
    """Transformers' module of models takes seconds."""
    code = "import hf_hyperconn, sys; sys.exit('transformers.modeling_utils' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY).returncode == 0


def test_dir_names_classes_that_are_there():
    names = dir(hf_hyperconn)
    assert {"HCLlamaConfig", "HCLlamaForCausalLM", "HCOlmoeModel", "HyperConnectionConfig", "convert_model"} <= {
        *names
    }
    assert {find_family(model_type).usual_architecture for model_type in LISTED_FAMILIES} <= {
        name[2:] for name in names
    }
    assert all(getattr(hf_hyperconn, name) is not None for name in names if name.startswith("HCLlama"))
    assert not any(name.startswith("HCLlama") for name in hf_hyperconn.__all__), "import * would make every class"


def test_help_explains_every_field():
    explained = [line.partition(" (`")[0] for line in getdoc(HCLlamaConfig).splitlines() if " (`" in line[:60]]
    assert FIELDS.keys() <= {name for line in explained for name in line.split(", ")}
    assert issubclass(HCLlamaConfig, HyperConnectionConfig)


def test_a_config_of_the_base_is_refused_with_the_right_calls():
    with pytest.raises(TypeError, match=r"got LlamaConfig.*HCLlamaForCausalLM\.from_prenorm\(BASE\)") as refused:
        HCLlamaForCausalLM(llama_config())
    assert "HCLlamaForCausalLM(HCLlamaConfig.from_prenorm(config))" in str(refused.value)


def test_a_base_is_loaded_with_new_connections_and_says_so(llama_folder, llama, ids, caplog):
    loaded, info = HCLlamaForCausalLM.from_pretrained(llama_folder, output_loading_info=True)
    assert torch.equal(loaded.eval()(ids).logits, llama(ids).logits)
    (said,) = caplog.messages
    assert said == (
        f"'{llama_folder}' is a base without connections. Its weights were loaded. The connections (dhc, hc_mult=4) "
        f"are new: they start at the equivalent initialization."
    )
    assert info["missing_keys"] == {name for name, _ in loaded.named_parameters() if "_hc." in name}
    caplog.clear()
    HCLlamaForCausalLM.from_pretrained(llama_folder, connection="keel", hc_mult=1)
    assert "start as for training from scratch" in caplog.text
    caplog.clear()
    HCLlamaForCausalLM.from_prenorm(llama_folder)
    assert not caplog.messages


def test_weights_that_are_really_missing_are_reported(llama_folder, tmp_path, caplog):
    HCLlamaForSequenceClassification.from_pretrained(llama_folder)
    report = caplog.messages[-1]
    assert "score.weight" in report
    assert "attn_hc" not in report
    base = LlamaForCausalLM.from_pretrained(llama_folder)
    HCLlamaForCausalLM.from_prenorm(llama_folder).save_pretrained(tmp_path, state_dict=base.state_dict())
    caplog.clear()
    HCLlamaForCausalLM.from_pretrained(tmp_path)
    assert "attn_hc.static_alpha" in caplog.text, "a conversion has lost its connections"
