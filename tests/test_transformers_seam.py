"""What happens when something of Transformers that it doesn't promise is gone: each is taken away in turn."""

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, OlmoeConfig, OlmoeForCausalLM

from hf_hyperconn.conversion import cli

from .isolated import isolated
from .marks import few

TOKENIZATION = "transformers.models.auto.tokenization_auto"
CONVERSION = "transformers.conversion_mapping"
# what is taken away: where it stands, its name, and the warning; None for an error
GONE = {
    "tokenizers": (TOKENIZATION, "TOKENIZER_MAPPING_NAMES", "AutoTokenizer may not find"),
    "overruled tokenizers": (TOKENIZATION, "MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS", "AutoTokenizer may not find"),
    "processors": ("transformers.models.auto.processing_auto", "PROCESSOR_MAPPING", "AutoProcessor may not find"),
    "patterns": (CONVERSION, "_MODEL_TO_CONVERSION_PATTERN", "PEFT may not translate"),
    "experts": ("PreTrainedModel", "_can_set_experts_implementation", "set_experts_implementation has no effect"),
    "split": ("PreTrainedModel", "_no_split_modules", "device_map may split a decoder layer"),
    "precision": ("PreTrainedModel", "_keep_in_fp32_modules_strict", "not in float32"),
    "mapping": (CONVERSION, "get_checkpoint_conversion_mapping", None),
    "registration": (CONVERSION, "register_checkpoint_conversion_mapping", None),
    "renaming": ("transformers.core_model_loading", "WeightRenaming", None),
    "classes": ("transformers.models.olmoe.modeling_olmoe", "OlmoeDecoderLayer", None),
    "config": ("transformers.models.olmoe.configuration_olmoe", "OlmoeConfig", None),
}
FAST = ("split", "mapping", "classes")
ERRORS = dict.fromkeys(("classes", "config"), "or bring the code up to date, by `pip install hf_hyperconn`")
# the name is gone while the folder's classes are made; Transformers' own loading, which needs some, has it back
PROGRAM = """
import importlib, json, sys
import torch, transformers
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.dynamic_module_utils import get_class_from_dynamic_module
place, name, folder = sys.argv[1:]
owner = transformers.PreTrainedModel if place == "PreTrainedModel" else importlib.import_module(place)
transformers.models.olmoe.modeling_olmoe.OlmoeForCausalLM
get_checkpoint_conversion_mapping("olmoe")  # made at the first call
kept = vars(owner)[name]
delattr(owner, name)
try:
    model_class = get_class_from_dynamic_module("modeling_hc_olmoe.HCOlmoeForCausalLM", folder)
finally:
    setattr(owner, name, kept)
model = model_class.from_pretrained(folder)
with torch.no_grad():
    print(json.dumps(model(torch.arange(3, 9)[None]).logits.flatten().tolist()))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A converted mixture of experts, whose weights have other names on disk than in the model."""
    place = tmp_path_factory.mktemp("seam")
    torch.manual_seed(0)
    sizes = {"vocab_size": 32, "hidden_size": 16, "intermediate_size": 8, "num_hidden_layers": 2, "num_experts": 4}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_experts_per_tok": 2}
    OlmoeForCausalLM(OlmoeConfig(**sizes, **heads, pad_token_id=0, eos_token_id=2)).save_pretrained(place / "base")
    assert cli.main(["convert", str(place / "base"), str(place / "hc"), "-q", "--verify", "structure"]) == 0
    return place / "hc"


@pytest.mark.parametrize("what", few(GONE, "mapping"))
def test_a_convenience_is_left_out_and_names_of_weights_are_missed(what, folder, tmp_path):
    place, name, warning = GONE[what]
    done = isolated(PROGRAM, place, name, folder, place=tmp_path)
    if warning is None:
        assert done.returncode != 0
        assert ERRORS.get(what, "has no translation of weights' names as this code knows it") in done.stderr
        assert "Install " in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(warning) == 1
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(folder)(torch.arange(3, 9)[None]).logits
    assert torch.equal(torch.tensor(json.loads(done.stdout)).view_as(expected), expected)
