"""Models built and loaded side by side: nothing that they share is changed, not even for a moment."""

import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module
from transformers.utils import logging

from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM, HCLlamaForSequenceClassification, HCLlamaModel
from hf_hyperconn.families.modules import PACKAGE

from .conftest import TINY, llama_config


@pytest.fixture
def at_once():
    """Calls a function in eight threads, which start together and take turns often; returns the results."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-4)

    def run(function, threads=8):
        barrier = threading.Barrier(threads)

        def one(_):
            barrier.wait()
            return function()

        with ThreadPoolExecutor(threads) as pool:
            return list(pool.map(one, range(threads)))

    yield run
    sys.setswitchinterval(interval)


@pytest.mark.parametrize("model_class", [HCLlamaForCausalLM, HCLlamaForSequenceClassification, HCLlamaModel])
def test_models_built_from_one_config(model_class, at_once):
    config = HCLlamaConfig(**TINY)
    for models in at_once(lambda: [model_class(config) for _ in range(2)]):
        for model in models:
            assert len(model.base_model.layers) == 3
            assert model.config is config
            assert all(part.config is config for part in model.modules() if hasattr(part, "config"))
    assert config.num_hidden_layers == 3


def test_a_config_is_not_changed_while_a_model_is_built(monkeypatch):
    """But for what Transformers settles in the config of any model that it builds."""
    config, counts = HCLlamaConfig(**TINY), []
    before = dict(vars(config))
    monkeypatch.setattr(HCLlamaModel, "_init_weights", lambda *args: counts.append(config.num_hidden_layers))
    HCLlamaForCausalLM(config)
    assert set(counts) == {3}
    settled = {"_attn_implementation_internal", "_experts_implementation_internal"}
    assert {name for name, value in vars(config).items() if value is not before.get(name)} <= settled


@pytest.fixture
def process():
    """Fails when what Transformers exchanges while it loads a model has not been put back."""
    exchanged = (PreTrainedModel.tie_weights, torch.linspace, torch.get_default_dtype())
    yield
    assert exchanged == (PreTrainedModel.tie_weights, torch.linspace, torch.get_default_dtype())


@pytest.mark.usefixtures("process")
def test_bases_loaded_side_by_side(llama_folder, llama, ids, at_once):
    with torch.no_grad():
        expected = llama(ids).logits
        for model in at_once(lambda: HCLlamaForCausalLM.from_prenorm(llama_folder, dtype=torch.float32), threads=3):
            assert torch.equal(model(ids).logits, expected)


@pytest.mark.usefixtures("process")
def test_conversions_loaded_side_by_side(llama_folder, llama, ids, at_once, tmp_path):
    HCLlamaForCausalLM.from_prenorm(llama_folder).save_pretrained(tmp_path)
    with torch.no_grad():
        expected = llama(ids).logits
        for model in at_once(lambda: AutoModelForCausalLM.from_pretrained(tmp_path), threads=3):
            assert torch.equal(model(ids).logits, expected)


def test_loading_a_base_leaves_the_verbosity_and_is_quiet(llama_folder, monkeypatch, caplog):
    for name in ("set_verbosity", "set_verbosity_error"):
        monkeypatch.setattr(logging, name, _forbidden)
    HCLlamaForCausalLM.from_prenorm(llama_folder)
    assert "attn_hc" not in caplog.text
    AutoModelForCausalLM.from_pretrained(llama_folder, config=HCLlamaConfig.from_prenorm(llama_config()))
    assert "attn_hc" not in caplog.text
    assert "The connections (dhc, hc_mult=4) are new" in caplog.text  # from_prenorm need not say so


def _forbidden(*args):
    raise AssertionError("the verbosity of the whole process was changed")


def test_a_subclass_is_not_registered_by_building_it():
    class MyModel(HCLlamaModel):
        pass

    class MyClassifier(HCLlamaForSequenceClassification):
        model_class = MyModel

    config = HCLlamaConfig(**TINY)
    assert type(MyClassifier(config).model) is MyModel
    assert type(AutoModel.from_config(config)) is HCLlamaModel


def test_copies_of_the_code_take_turns(llama_folder, tmp_path):
    """As of two folders in one process: what loading exchanges is the process's."""
    HCLlamaForCausalLM.from_prenorm(llama_folder).save_pretrained(tmp_path)
    copy = get_class_from_dynamic_module("modeling_hc_llama.HCLlamaModel", tmp_path).__module__.rpartition(".")[0]
    assert copy.startswith("transformers_modules.")
    locks = [sys.modules[f"{package}.modeling_hyper_connections"]._loading for package in (copy, PACKAGE)]
    assert locks[0] is locks[1]
