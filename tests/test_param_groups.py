"""Which parameters decay, at which rate they learn, which are frozen."""

import json
import re

import datasets
import pytest
import torch
import trl
from transformers import Trainer, TrainingArguments

from hf_hyperconn import HCTrainer, HCTrainerMixin, convert_model, freeze_base, freeze_hc, hc_param_groups
from hf_hyperconn.conversion.demo import byte_tokenizer
from hf_hyperconn.errors import HyperConnError

from .conftest import hc_llama
from .families import FAMILIES
from .marks import few
from .record import GOLDEN, decay_by_name
from .tiny import tiny

CONNECTIONS = {
    "shc": {"connection": "shc"},
    "dhc": {"connection": "dhc"},
    "mhc, learned readout": {"connection": "mhc", "hc_readout": "learned"},
    "ihc": {"connection": "ihc"},
    "frac": {"connection": "frac"},
    "keel": {"connection": "keel", "hc_mult": 1},
    "dhc, dyt": {"connection": "dhc", "norm": "dyt"},
    "dhc, derf": {"connection": "dhc", "norm": "derf"},
}


@pytest.mark.parametrize("model_type", FAMILIES)
def test_decay_of_every_parameter_of_a_family(model_type):
    assert decay_by_name(convert_model(tiny(model_type))) == json.loads(GOLDEN.read_text())["families"][model_type]


@pytest.mark.parametrize("name", CONNECTIONS)
def test_decay_of_every_parameter_of_a_connection(name):
    fields = {"hc_mult": 2, **CONNECTIONS[name]}
    assert decay_by_name(hc_llama(**fields)) == json.loads(GOLDEN.read_text())["connections"][name]


def test_the_rule_of_the_paper():
    """Static matrices and scales do not decay, what predicts the dynamic part does, norms and biases as usual."""
    decays = decay_by_name(hc_llama(attention_bias=True))
    connection = {name.rpartition("attn_hc.")[2]: decay for name, decay in decays.items() if "attn_hc" in name}
    assert {name for name, decay in connection.items() if decay} == {"dynamic_alpha_fn", "dynamic_beta_fn"}
    assert decays["model.layers.*.self_attn.q_proj.weight"] == 0.1
    assert decays["model.layers.*.self_attn.q_proj.bias"] == decays["model.norm.weight"] == 0.0


def test_parameters_outside_the_connections_are_grouped_as_by_transformers(llama, tmp_path):
    trainer = Trainer(llama, TrainingArguments(tmp_path, use_cpu=True))
    usual = set(trainer.get_decay_parameter_names(llama))
    decays = decay_by_name(convert_model(llama))
    assert {name for name, _ in llama.named_parameters() if decays[re.sub(r"\.\d+\.", ".*.", name)]} == usual


def test_what_another_trainer_excludes_is_excluded():
    class Careful(Trainer):
        def get_decay_parameter_names(self, model):
            return [name for name in super().get_decay_parameter_names(model) if "embed" not in name]

    class HCCareful(HCTrainerMixin, Careful):
        pass

    model = hc_llama()
    careful, usual = (
        trainer_class.__new__(trainer_class).get_decay_parameter_names(model)
        for trainer_class in (HCCareful, HCTrainer)
    )
    assert set(usual) - set(careful) == {"model.embed_tokens.weight"}


def test_learning_rates_and_what_is_left_out():
    model = hc_llama()
    groups = hc_param_groups(model, lr=1e-4, weight_decay=0.1, hc_lr=1e-2)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for group in groups:
        assert {"_hc." in names[id(p)] for p in group["params"]} == {group["lr"] == 1e-2}
    assert sum(len(group["params"]) for group in groups) == len(names)
    torch.optim.AdamW(groups)

    freeze_base(model)
    groups = hc_param_groups(model, lr=1e-4, weight_decay=0.1)
    assert [group["lr"] for group in groups] == [1e-4, 1e-4]
    assert all("_hc." in names[id(p)] for group in groups for p in group["params"])
    freeze_hc(model)
    assert hc_param_groups(model, lr=1e-4, weight_decay=0.1) == []


@pytest.mark.parametrize(("width", "depth"), [(False, True), (True, False), (True, True), (False, False)])
@pytest.mark.parametrize("tanh", few((False, True), True))
def test_ablations_of_table_3(width, depth, tanh, ids):
    """What is frozen stays; the rest moves, the dynamic part once it has left zero."""
    model = hc_llama(hc_mult=4, hc_tanh=tanh).train()
    freeze_hc(model, width=width, depth=depth)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(12):
        optimizer.zero_grad()
        model(ids, labels=ids).loss.backward()
        optimizer.step()
    for name, parameter in model.named_parameters():
        moved = not torch.equal(parameter, before[name])
        if "_alpha" in name:
            assert moved != width, name
        elif "_beta" in name:
            assert moved != depth, name
        elif "_hc.norm" in name:
            assert (parameter.grad is not None and bool(parameter.grad.any())) != (width and depth), name
        else:
            assert moved, name


def test_what_can_not_be_frozen(llama):
    for freeze in (freeze_base, freeze_hc):
        with pytest.raises(HyperConnError, match=r"LlamaForCausalLM has no hyper-connections. Convert it first"):
            freeze(llama)
    with pytest.raises(HyperConnError, match="width and depth share. Freeze both or none"):
        freeze_hc(hc_llama(connection="mhc"), depth=False)
    assert all(parameter.requires_grad for parameter in llama.parameters())


def trainer_of(trainer_class, model, folder, **arguments):
    data = [{"input_ids": row, "labels": row} for row in torch.randint(3, 96, (8, 16))]
    settings = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "max_steps": 2, "save_strategy": "no"}
    settings |= {"weight_decay": 0.1, "learning_rate": 1e-3, "lr_scheduler_type": "linear", "logging_steps": 1}
    return trainer_class(model, TrainingArguments(str(folder), **settings), train_dataset=data, **arguments)


def test_the_trainer_has_the_groups_and_schedules_both_rates(tmp_path):
    trainer = trainer_of(HCTrainer, hc_llama(), tmp_path, hc_lr=1e-2)
    trainer.create_optimizer()
    groups = [group for group in trainer.optimizer.param_groups if group["params"]]
    ours, expected = (
        {id(p): (group["lr"], group["weight_decay"]) for group in given for p in group["params"]}
        for given in (groups, hc_param_groups(trainer.model, 1e-3, 0.1, hc_lr=1e-2))
    )
    assert ours == expected
    trainer.create_scheduler(num_training_steps=2)
    trainer.optimizer.step()
    trainer.lr_scheduler.step()
    assert {group["lr"] for group in groups} == {5e-3, 5e-4}
    assert trainer_of(HCTrainer, hc_llama(), tmp_path, hc_lr=1e-2).train().global_step == 2


def test_a_rate_is_refused_with_an_optimizer_that_would_not_have_it(tmp_path):
    model = hc_llama()
    optimizers = (torch.optim.AdamW(model.parameters(), lr=1e-4), None)
    assert trainer_of(HCTrainer, model, tmp_path, optimizers=optimizers).train().global_step == 2
    with pytest.raises(HyperConnError, match=r"hc_lr=0.01 has no effect on an optimizer that the Trainer is given"):
        trainer_of(HCTrainer, model, tmp_path, optimizers=optimizers, hc_lr=1e-2)


def test_without_a_rate_of_its_own_the_trainer_changes_decay_only(tmp_path):
    usual, ours = (
        trainer_of(trainer_class, hc_llama(), tmp_path).create_optimizer().param_groups
        for trainer_class in (Trainer, HCTrainer)
    )
    assert [(group["lr"], group["weight_decay"]) for group in usual] == [
        (group["lr"], group["weight_decay"]) for group in ours
    ]


def test_the_mixin_serves_trl(tmp_path):
    class HCSFTTrainer(HCTrainerMixin, trl.SFTTrainer):
        pass

    settings = trl.SFTConfig(
        str(tmp_path), use_cpu=True, report_to=[], max_steps=1, bf16=False, dataset_text_field="t"
    )
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = tokenizer.pad_token = "!"
    data = datasets.Dataset.from_dict({"t": ["def read(self)", "return self"] * 8})
    model = hc_llama(vocab_size=256)
    trainer = HCSFTTrainer(model, args=settings, train_dataset=data, processing_class=tokenizer, hc_lr=1e-2)
    trainer.train()
    names = {id(parameter): name for name, parameter in trainer.model.named_parameters()}
    initial = {names[id(p)]: group["initial_lr"] for group in trainer.optimizer.param_groups for p in group["params"]}
    assert {lr for name, lr in initial.items() if "_hc." in name} == {1e-2}
    assert {lr for name, lr in initial.items() if "_hc." not in name} == {settings.learning_rate}
