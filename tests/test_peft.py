"""PEFT on hyper-connection models: what works on the base works here, and connections train along."""

import json
import os

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.integrations.peft import MIN_PEFT_VERSION

from hf_hyperconn import HCLlamaForCausalLM, freeze_base, hc_parameters, load_hc, save_hc
from hf_hyperconn.errors import HyperConnectionFileError
from hf_hyperconn.models.chosen_code import readout_maker

from .adapted import CONNECTIONS, logits, train
from .conftest import hc_llama
from .isolated import printed
from .tolerances import MERGED

peft = pytest.importorskip("peft")

loads_copies = pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"), reason="Transformers left out modules_to_save, of any model"
)


@pytest.fixture(scope="module")
def trained(stories, tmp_path_factory):
    """A conversion of stories260k with LoRA and its connections trained, and the folder of the adapter."""
    model = peft.get_peft_model(HCLlamaForCausalLM.from_prenorm(stories), peft.LoraConfig(modules_to_save=CONNECTIONS))
    ids = torch.randint(3, 500, (4, 32), generator=torch.Generator().manual_seed(0))
    losses = train(model, ids)
    assert losses[-1] < losses[0]
    folder = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(folder)
    return model.eval(), folder


@pytest.fixture
def new(stories):
    """Makes that conversion anew."""
    return lambda: HCLlamaForCausalLM.from_prenorm(stories)


def test_training_moves_adapters_and_connections_and_not_the_base(trained, new):
    model, folder = trained
    plain = new().state_dict()
    unwrapped = model.get_base_model().state_dict()
    for name, value in plain.items():
        owner, _, parameter = name.rpartition(".")
        names = [name, f"{owner}.base_layer.{parameter}"]
        if "_hc." in name:
            path, _, parameter = name.partition("_hc.")
            names = [f"{path}_hc.original_module.{parameter}"]
            assert f"{path}_hc.modules_to_save.default.{parameter}" in unwrapped
        assert any(torch.equal(value, unwrapped[candidate]) for candidate in names if candidate in unwrapped)
    assert not all(torch.equal(value, plain[name]) for name, value in hc_parameters(model).items())
    saved = load_file(folder / "adapter_model.safetensors")
    assert {name.split(".")[5] for name in saved} == {"self_attn", *CONNECTIONS}


def test_a_saved_adapter_is_loaded_again(trained, new, ids):
    model, folder = trained
    expected = logits(model, ids)
    assert not torch.equal(expected, logits(new(), ids))
    again = peft.PeftModel.from_pretrained(new(), folder)
    assert torch.equal(logits(again, ids), expected)
    with again.disable_adapter():
        assert torch.equal(logits(again, ids), logits(new(), ids))


@loads_copies
def test_a_saved_adapter_is_loaded_again_by_transformers(trained, new, ids):
    model, folder = trained
    loaded = new()
    loaded.load_adapter(folder)
    assert torch.equal(logits(loaded, ids), logits(model, ids))


def test_merged_it_computes_the_same_and_is_a_plain_model_again(trained, new, ids, tmp_path):
    model, folder = trained
    merged = peft.PeftModel.from_pretrained(new(), folder).merge_and_unload()
    torch.testing.assert_close(logits(merged, ids), logits(model, ids), **MERGED)
    for name, value in hc_parameters(model).items():
        assert torch.equal(merged.get_parameter(name), value)
    merged.save_pretrained(tmp_path)
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path), ids), logits(merged, ids))


def test_unloaded_it_keeps_what_was_trained_whole(trained, new, ids):
    """PEFT's `unload` drops adapters and leaves the copies of `modules_to_save` in place."""
    model, folder = trained
    unloaded = peft.PeftModel.from_pretrained(new(), folder).unload()
    plain = new()
    for name, value in hc_parameters(model).items():
        plain.get_parameter(name).data.copy_(value)
    assert torch.equal(logits(unloaded, ids), logits(plain, ids))


def test_batches_of_several_adapters_are_refused(ids):
    """PEFT can't choose between copies of a connection for each row; it says so."""
    model = peft.get_peft_model(hc_llama(), peft.LoraConfig(modules_to_save=CONNECTIONS)).eval()
    with pytest.raises(TypeError, match="Mixed batching is only supported for the following modules"):
        model(input_ids=ids, adapter_names=["default", "__base__"])


def test_an_adapter_names_its_conversion(new, ids, tmp_path):
    """So that PEFT's Auto classes find it: it was loaded from there."""
    new().save_pretrained(tmp_path / "converted")
    model = HCLlamaForCausalLM.from_pretrained(tmp_path / "converted")
    model = peft.get_peft_model(model, peft.LoraConfig(modules_to_save=CONNECTIONS, task_type="CAUSAL_LM"))
    train(model, ids)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.AutoPeftModelForCausalLM.from_pretrained(tmp_path / "adapter")
    assert torch.equal(logits(again, ids), logits(model, ids))


@pytest.mark.skipif(
    Version(peft.__version__) < Version(MIN_PEFT_VERSION), reason="Transformers asks for a PEFT that is not released"
)
def test_adapters_that_transformers_adds_itself(ids, tmp_path):
    model, plain = hc_llama(), hc_llama()
    model.add_adapter(peft.LoraConfig(modules_to_save=CONNECTIONS))
    assert hc_parameters(model).keys() == hc_parameters(plain).keys()
    losses = train(model, ids)
    assert losses[-1] < losses[0]
    load_hc(plain, save_hc(model, tmp_path))
    assert all(torch.equal(value, plain.get_parameter(name)) for name, value in hc_parameters(model).items())


@pytest.mark.parametrize(
    "fields",
    [
        {"connection": "shc"},
        {"connection": "mhc", "hc_readout": "learned"},
        {"connection": "ihc"},
        {"connection": "frac"},
        {"connection": "keel", "hc_mult": 1},
        {"connection": "shc", "hc_start": "history", "hc_readout": "weighted"},
        {"connection": "attnres", "hc_mult": 1},
        {"connection": "altup"},
        {"connection": "dual", "hc_mult": 2},
        {"connection": "skip", "hc_mult": 2},
    ],
    ids=lambda fields: "-".join(map(str, fields.values())),
)
def test_every_connection_trains_as_a_module_to_save(fields, ids, tmp_path):
    expected = logits(hc_llama(**fields), ids)
    modules = [*CONNECTIONS, *(["hc_head"] if readout_maker(hc_llama(**fields).config) else [])]
    model = peft.get_peft_model(hc_llama(**fields), peft.LoraConfig(modules_to_save=modules))
    assert torch.equal(logits(model, ids), expected)
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    losses = train(model, ids)
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(hc_llama(**fields), tmp_path)
    assert torch.equal(logits(again, ids), logits(model, ids))
    torch.testing.assert_close(logits(again.merge_and_unload(), ids), logits(model, ids), **MERGED)


def test_the_trainer_trains_it(new, ids, tmp_path):
    pytest.importorskip("accelerate")
    model = peft.get_peft_model(new(), peft.LoraConfig(modules_to_save=CONNECTIONS))
    arguments = {"output_dir": str(tmp_path), "report_to": [], "use_cpu": True, "disable_tqdm": True, "max_steps": 3}
    arguments |= {"save_steps": 3, "logging_steps": 1, "learning_rate": 1e-2, "per_device_train_batch_size": 2}
    data = [{"input_ids": row, "labels": row} for row in ids.repeat(3, 1)]
    trainer = Trainer(model, TrainingArguments(**arguments), train_dataset=data)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    assert losses[-1] < losses[0]
    again = peft.PeftModel.from_pretrained(new(), tmp_path / "checkpoint-3")
    assert torch.equal(logits(again, ids), logits(model, ids))


ELSEWHERE = """
import json, sys
import peft, torch
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.integrations.peft import MIN_PEFT_VERSION
converted, adapter, ids = sys.argv[1], sys.argv[2], torch.tensor(json.loads(sys.argv[3]))
def load():
    return AutoModelForCausalLM.from_pretrained(converted, trust_remote_code=True).eval()
model = load()
assert type(model).__module__.startswith("transformers_modules")
with torch.no_grad():
    logits = peft.PeftModel.from_pretrained(model, adapter)(ids).logits
defaults = peft.get_peft_model(load(), peft.LoraConfig()).peft_config["default"].target_modules
print(json.dumps({"logits": logits.tolist(), "defaults": sorted(defaults)}))
"""


def test_an_adapter_is_loaded_where_this_package_is_not(trained, new, ids, tmp_path):
    """Onto a folder's own code; LoRA's defaults are there too."""
    model, folder = trained
    new().save_pretrained(tmp_path / "converted")
    arguments = tmp_path / "converted", folder, json.dumps(ids.tolist())
    found = json.loads(printed(ELSEWHERE, *arguments, place=tmp_path))
    assert torch.equal(torch.tensor(found["logits"]), logits(model, ids))
    assert found["defaults"] == ["q_proj", "v_proj"]


def test_the_file_of_connections_takes_the_active_copy(trained, new, ids, tmp_path):
    """And gives them to the wrapped model as to the plain one."""
    model, folder = trained
    plain = new()
    assert hc_parameters(model).keys() == hc_parameters(plain).keys()
    file = save_hc(model, tmp_path)
    merged = peft.PeftModel.from_pretrained(new(), folder).merge_and_unload()
    load_hc(plain, file)
    for name, value in hc_parameters(merged).items():
        assert torch.equal(plain.get_parameter(name), value)

    wrapped = peft.get_peft_model(new(), peft.LoraConfig(modules_to_save=CONNECTIONS))
    assert load_hc(wrapped, file) is wrapped
    assert torch.equal(logits(wrapped, ids), logits(plain, ids))
    with wrapped.disable_adapter():
        start = new()
        assert torch.equal(logits(wrapped, ids), logits(start, ids))
        assert all(torch.equal(start.get_parameter(name), value) for name, value in hc_parameters(wrapped).items())


def test_freezing_the_base_leaves_the_copies_of_the_active_adapter(ids):
    """Parameters that train without being used would stop DDP."""
    model = peft.get_peft_model(hc_llama(), peft.LoraConfig(modules_to_save=CONNECTIONS))
    model.add_adapter("other", peft.LoraConfig(modules_to_save=CONNECTIONS))
    freeze_base(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert len(trained) == len(hc_parameters(model))
    assert all("_hc.modules_to_save.default." in name for name in trained)
    model(input_ids=ids, labels=ids).loss.backward()
    assert all(model.get_parameter(name).grad is not None for name in trained)


def test_the_file_of_connections_refuses_adapters_on_them(tmp_path):
    model = peft.get_peft_model(hc_llama(), peft.LNTuningConfig(task_type="CAUSAL_LM"))
    with pytest.raises(HyperConnectionFileError, match="attn_hc.norm.base_layer.weight'. Merge it first"):
        save_hc(model, tmp_path)
    assert not os.listdir(tmp_path)
    merged = model.merge_and_unload()
    assert load_file(save_hc(merged, tmp_path)).keys() == hc_parameters(hc_llama()).keys()
