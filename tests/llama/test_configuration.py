"""The config of an HC-Llama."""

import pytest
from transformers import AutoConfig, LlamaForCausalLM

from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM
from tests.conftest import llama_config

from .conftest import hc_config


def test_config_keeps_the_base_fields(tmp_path):
    base = llama_config(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 500.0})
    config = HCLlamaConfig.from_prenorm(base, hc_mult=3, connection="shc")
    config.save_pretrained(tmp_path)
    loaded = AutoConfig.from_pretrained(tmp_path)
    assert type(loaded) is HCLlamaConfig
    skipped = ("model_type", "transformers_version", "_name_or_path")
    expected = {name: value for name, value in base.to_dict().items() if name not in skipped}
    assert {name: loaded.to_dict()[name] for name in expected} == expected
    assert (loaded.hc_mult, loaded.connection, loaded.hc_tanh, loaded.hc_readout) == (3, "shc", True, "mean")


def test_config_of_another_family_is_refused():
    with pytest.raises(ValueError, match="'llama' config, not from 'mistral'"):
        HCLlamaConfig.from_prenorm(AutoConfig.for_model("mistral"))


def test_parallel_plans():
    config, base = hc_config(), llama_config()
    assert config.base_model_tp_plan == base.base_model_tp_plan
    assert config.base_model_pp_plan is None
    model = HCLlamaForCausalLM(config)
    assert model._pp_plan in (None, {})
    assert model._tp_plan == LlamaForCausalLM(base)._tp_plan


def test_fields_given_on_loading_are_checked_as_the_config_s_own(tmp_path):
    config = hc_config(hc_start="history", hc_readout="weighted")
    HCLlamaForCausalLM(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="hc_readout must be 'weighted' with hc_start 'history'"):
        HCLlamaForCausalLM.from_pretrained(tmp_path, hc_readout="mean")
