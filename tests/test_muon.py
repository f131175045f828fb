"""Muon: which matrices it may have, beside AdamW in one optimizer, in the Trainer; what is refused."""

import re
from copy import deepcopy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import AutoModel, CohereConfig, GPT2Config, MambaConfig, T5Config, Trainer, TrainingArguments

from hf_hyperconn import HCTrainer, convert_model, freeze_base, hc_param_groups
from hf_hyperconn.errors import HyperConnError
from hf_hyperconn.models.sub_layers import is_of_connection
from hf_hyperconn.training.deepspeed import refuse_shared_settings
from hf_hyperconn.training.muon import CombinedOptimizer

from .conftest import TINY, hc_llama
from .families import FAMILIES
from .marks import few
from .test_param_groups import CONNECTIONS, trainer_of
from .tiny import tiny

ATTENTION = {f"self_attn.{name}_proj" for name in "qkvo"}
MLP = {f"mlp.{name}_proj" for name in ("gate", "up", "down")}
MATRICES = {
    "llama": ATTENTION | MLP,
    "phi3": {"self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj"},
    "olmoe": {*ATTENTION, "mlp.gate"},
    "gpt_oss": {*ATTENTION, "mlp.router"},
}
OTHERS = {
    "gpt2": (
        GPT2Config(n_embd=32, n_layer=1, n_head=2, vocab_size=96),
        {"attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"},
    ),
    "mamba": (
        MambaConfig(hidden_size=32, num_hidden_layers=1, vocab_size=96, state_size=4),
        {"mixer.in_proj", "mixer.x_proj", "mixer.dt_proj", "mixer.out_proj"},
    ),
    "t5": (
        T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, vocab_size=96),
        {f"{kind}.{name}" for kind in ("SelfAttention", "EncDecAttention") for name in "qkvo"}
        | {"DenseReluDense.wi", "DenseReluDense.wo"},
    ),
    # its norms of queries and keys have a weight for each head
    "cohere": (CohereConfig(**{**TINY, "num_hidden_layers": 1}, use_qk_norm=True), ATTENTION | MLP),
}


def names_of(groups: list, model: nn.Module) -> list[str]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    return [names[id(parameter)] for group in groups for parameter in group["params"]]


def of_muon(model: nn.Module) -> list[str]:
    groups = hc_param_groups(model, 1e-3, 0.1, muon=True)
    assert sorted(names_of(groups, model)) == sorted(name for name, _ in model.named_parameters())
    return names_of([group for group in groups if group["use_muon"]], model)


@pytest.mark.parametrize("model_type", MATRICES)
def test_muon_has_the_matrices_of_layers_in_a_base_and_in_its_conversion(model_type):
    base = tiny(model_type)
    layers = base.config.num_hidden_layers
    found = of_muon(convert_model(base))
    assert set(found) == {f"model.layers.{i}.{name}.weight" for i in range(layers) for name in MATRICES[model_type]}
    assert of_muon(base) == found


@pytest.mark.parametrize("model_type", few(FAMILIES, "deepseek_v3", "qwen2_moe"))
def test_no_family_has_anything_else_there(model_type):
    """No embedding, head, norm or bias, nor experts in one tensor, nor a row that is no matrix."""
    model = convert_model(tiny(model_type))
    modules, parameters = dict(model.named_modules()), dict(model.named_parameters())
    for name in of_muon(model):
        owner = modules[name.removesuffix(".weight")]
        assert isinstance(owner, nn.Linear) or type(owner).__name__.lower().endswith("router"), name
        assert parameters[name].dim() == 2
        assert min(parameters[name].shape) > 1
        assert ".layers." in name


@pytest.mark.parametrize("model_type", OTHERS)
def test_layers_of_other_forms(model_type):
    config, expected = OTHERS[model_type]
    for model in (base := AutoModel.from_config(config), convert_model(base)):
        assert {re.sub(r".*\.\d+\.", "", name) for name in of_muon(model)} == {f"{name}.weight" for name in expected}


@pytest.mark.parametrize("name", CONNECTIONS)
def test_connections_and_readouts_never_belong_to_it(name):
    model = hc_llama(**{"hc_mult": 2, **CONNECTIONS[name]})
    found = of_muon(model)
    assert len(found) == 21
    assert not any(map(is_of_connection, found))


def test_adapters_of_layers_are_matrices():
    model = get_peft_model(hc_llama(), LoraConfig(modules_to_save=["attn_hc", "mlp_hc"], task_type="CAUSAL_LM"))
    groups = hc_param_groups(model, 1e-3, 0.1, muon=True)
    found = names_of([group for group in groups if group["use_muon"]], model)
    assert len(found) == 12
    assert all(re.search(r"_proj\.lora_[AB]\.default\.weight", name) for name in found)


def test_a_model_without_trained_matrices_is_refused():
    model = hc_llama()
    freeze_base(model)
    for refused in (model, nn.Linear(4, 4)):
        with pytest.raises(HyperConnError, match="has no trained matrices inside of layers.* Leave muon out"):
            hc_param_groups(refused, 1e-3, 0.1, muon=True)


@pytest.mark.parametrize(("make", "hc_lr"), [(hc_llama, 1e-2), (lambda: deepcopy(tiny("llama")), None)])
def test_the_trainer_s_optimizer_steps_as_the_two_do(make, hc_lr, tmp_path, ids):
    """Bit for bit, of a conversion with both rates and of a base."""
    model = make()
    expected = deepcopy(model)
    groups = hc_param_groups(expected, 1e-3, 0.1, hc_lr=hc_lr, muon=True)
    muon = torch.optim.Muon([group for group in groups if group["use_muon"]], adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([group for group in groups if not group["use_muon"]], fused=True)
    before = dict(deepcopy(model).named_parameters())
    combined = trainer_of(HCTrainer, model, tmp_path, hc_lr=hc_lr, muon=True).create_optimizer()
    for _ in range(2):
        for trained, optimizers in ((model, [combined]), (expected, [muon, adamw])):
            trained(ids, labels=ids).loss.backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name)), name
        assert not torch.equal(parameter, before[name]), name


def test_a_resumed_run_is_that_of_an_uninterrupted_one(tmp_path):
    whole, resumed = (trainer_of(HCTrainer, hc_llama(), tmp_path, hc_lr=1e-2, muon=True) for _ in range(2))
    whole.args.save_strategy, whole.args.save_steps = "steps", 1
    whole.train()
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    for theirs, ours in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(theirs, ours)


def test_a_group_that_is_added_is_trained_by_the_last_optimizer():
    weights = [nn.Parameter(torch.ones(4, 4)) for _ in range(3)]
    optimizer = CombinedOptimizer(torch.optim.Muon(weights[:1]), torch.optim.SGD(weights[1:2], lr=0.5))
    optimizer.add_param_group({"params": weights[2:]})
    for weight in weights:
        weight.grad = torch.ones(4, 4)
    assert optimizer.step(lambda: 3.0) == 3.0
    assert torch.equal(weights[2], torch.full((4, 4), 0.5))
    assert not torch.equal(weights[0], torch.ones(4, 4))
    with pytest.raises(ValueError, match="more than one parameter group"):
        optimizer.add_param_group({"params": weights[:1]})


def test_what_users_try_first_is_refused(tmp_path):
    model = hc_llama()
    matrices = [parameter for parameter in model.parameters() if parameter.dim() == 2]

    def given() -> dict:
        return {"optimizer_cls_and_kwargs": (torch.optim.Muon, {"params": matrices, "lr": 1e-3})}

    message = r"Muon has model.layers.0.attn_hc.static_alpha.*hc_param_groups\(model, ..., muon=True\)"
    with pytest.raises(HyperConnError, match=message):
        trainer_of(HCTrainer, model, tmp_path, **given()).create_optimizer()
    made = (torch.optim.Muon(matrices), None)
    with pytest.raises(HyperConnError, match=message):
        trainer_of(HCTrainer, model, tmp_path, optimizers=made).create_optimizer()
    for settings in (given(), {"optimizers": made}):
        with pytest.raises(HyperConnError, match="muon=True has no effect on an optimizer that the Trainer is given"):
            trainer_of(HCTrainer, model, tmp_path, muon=True, **settings)
    with pytest.raises(HyperConnError, match=r"needs optim='adamw_torch' .*got 'sgd'"):
        HCTrainer(model, TrainingArguments(str(tmp_path), optim="sgd", use_cpu=True), muon=True)
    trainer_of(Trainer, model, tmp_path, **given()).create_optimizer()  # Transformers takes it


def test_deepspeed_s_muon_is_refused(tmp_path):
    with pytest.raises(HyperConnError, match="DeepSpeed's Muon orthogonalizes"):
        refuse_shared_settings({"optimizer": {"type": "Muon", "params": {}}}, None)
    trainer = trainer_of(HCTrainer, hc_llama(), tmp_path)
    trainer.is_deepspeed_enabled = True
    with pytest.raises(HyperConnError, match=r"muon=True needs matrices, which DeepSpeed flattens. Use FSDP2"):
        trainer._refuse_besides_muon()
