"""Conversion of a loaded Llama; other families in test_families.py and test_generic.py."""

import types
from copy import deepcopy
from functools import partial

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GemmaForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
    Trainer,
    TrainingArguments,
)

from hf_hyperconn import convert_model
from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.in_memory import hand_settings
from hf_hyperconn.in_memory.hand_settings import SetByHand

from .conftest import llama_config, randomise_connections


def test_convert_model_shares_the_tensors(llama):
    hc = convert_model(llama, hc_mult=4, connection="dhc")
    parameters = dict(hc.named_parameters())
    for name, parameter in llama.named_parameters():
        assert parameters[name] is parameter
    assert hc.model.rotary_emb.inv_freq is llama.model.rotary_emb.inv_freq
    assert not any(tensor.is_meta for tensor in [*hc.parameters(), *hc.buffers()])


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_what_is_converted_in_inference_mode_can_be_trained(mode, llama, ids):
    base = deepcopy(llama)
    with mode():
        hc = convert_model(base)
    hc.train()(ids, labels=ids).loss.backward()
    assert all(parameter.grad is not None for parameter in hc.parameters())


def test_convert_model_refuses(llama):
    with pytest.raises(UnsupportedCheckpointError, match="got HCLlamaForCausalLM, which has connections already"):
        convert_model(convert_model(llama))
    with pytest.raises(UnsupportedCheckpointError, match="got Linear"):
        convert_model(torch.nn.Linear(2, 2))
    with pytest.raises(UnsupportedCheckpointError, match="got 'base'.*from_pretrained.*hf-hyperconn convert MODEL"):
        convert_model("base")
    with pytest.raises(TypeError, match=r"got 4 beside it.*convert_model\(model, hc_mult=4\)"):
        convert_model(llama, 4)


@pytest.fixture
def base(llama) -> LlamaForCausalLM:
    """A Llama that a test may change."""
    return deepcopy(llama)


def equal(model, other, ids) -> bool:
    with torch.no_grad():
        return torch.equal(model(ids).logits, other(ids).logits)


def state(model) -> list:
    """What may not change: tensors, their flags and grads, modes, hooks, settings, config and generation config."""
    parameters = model.named_parameters(remove_duplicate=False)
    return [
        [(name, id(p), p.requires_grad, p.detach().clone().tolist(), p.grad) for name, p in parameters],
        [(name, id(buffer), buffer.tolist()) for name, buffer in model.named_buffers()],
        [
            (path, {name: repr(value) for name, value in vars(module).items() if name != "_modules"})
            for path, module in model.named_modules()
        ],
        (id(model.config), model.config.to_dict(), id(model.generation_config), model.generation_config.to_dict()),
    ]


def test_the_base_stays_as_it_was(base, ids):
    base.requires_grad_(False)
    base.model.norm.weight.requires_grad_(True)
    base.train()
    base.model.layers[1].eval()
    before = state(base)
    hc = convert_model(base)
    assert state(base) == before
    hc.generation_config.max_new_tokens = 3
    hc.config.num_hidden_layers = 1
    hc.eval()
    assert state(base) == before


def test_what_is_frozen_stays_frozen(base):
    base.requires_grad_(False)
    base.model.norm.weight.requires_grad_(True)
    trainable = {name for name, parameter in convert_model(base).named_parameters() if parameter.requires_grad}
    assert {name for name in trainable if "_hc." not in name} == {"model.norm.weight"}
    assert len(trainable) == 1 + 6 * 7


def test_modes_and_settings_come_along(base):
    base.train()
    base.model.layers[1].eval()
    base.model.layers[0].self_attn.attention_dropout = 0.25
    base.loss_function = loss = lambda *args, **kwargs: torch.zeros(())
    hc = convert_model(base)
    assert hc.training
    assert not hc.model.layers[1].mlp.training
    assert hc.model.layers[0].self_attn.attention_dropout == 0.25
    assert hc.loss_function is loss


def test_a_head_untied_by_hand_stays_untied(ids, tmp_path):
    torch.manual_seed(0)
    base = LlamaForCausalLM(llama_config(tie_word_embeddings=True, initializer_range=0.2)).eval()
    base.lm_head.weight = torch.nn.Parameter(torch.randn(96, 32))
    hc = convert_model(base)
    assert hc.lm_head.weight is base.lm_head.weight is not base.model.embed_tokens.weight
    assert base.config.tie_word_embeddings
    assert equal(hc, base, ids)
    hc.save_pretrained(tmp_path)
    assert equal(AutoModelForCausalLM.from_pretrained(tmp_path), base, ids)


def test_a_head_tied_by_hand_stays_tied(base, ids, tmp_path):
    base.lm_head.weight = base.model.embed_tokens.weight
    hc = convert_model(base)
    assert hc.lm_head.weight is hc.model.embed_tokens.weight is base.lm_head.weight
    hc.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.lm_head.weight is loaded.model.embed_tokens.weight
    assert equal(loaded, base, ids)


def test_an_ordinary_model_is_taken(base, ids, llama_folder, tmp_path):
    base(ids, output_hidden_states=True, output_attentions=True)  # Transformers leaves hooks that record them
    base.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    base.enable_input_require_grads()
    base.compile(backend="eager")
    hc = convert_model(base)
    assert hc.is_gradient_checkpointing
    assert all(layer._gradient_checkpointing_func.keywords == {"use_reentrant": False} for layer in hc.model.layers)
    assert hc.get_input_embeddings()(ids).requires_grad
    assert equal(hc, base, ids)
    for device in ({"device_map": "cpu"}, {"device_map": {"": "cpu"}}):
        loaded = LlamaForCausalLM.from_pretrained(llama_folder, **device)
        assert equal(convert_model(loaded), loaded, ids)


def test_a_model_that_trainer_has_trained(base, ids, tmp_path):
    pytest.importorskip("accelerate")
    settings = {"use_cpu": True, "max_steps": 1, "report_to": [], "save_strategy": "no", "disable_tqdm": True}
    data = [{"input_ids": row, "labels": row} for row in ids]
    trainer = Trainer(base, TrainingArguments(str(tmp_path), **settings), train_dataset=data)
    trainer.train()
    assert equal(convert_model(base.eval()), base, ids)


@pytest.fixture
def accelerator():
    """Of a process that trains in bfloat16."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    yield accelerate.Accelerator(cpu=True, mixed_precision="bf16")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


def test_a_model_in_mixed_precision_is_refused_until_it_is_unwrapped(accelerator, base, ids):
    accelerator.prepare(base)
    with pytest.raises(UnsupportedCheckpointError, match="the model has another 'forward'.* keep_fp32_wrapper=False"):
        convert_model(base)
    accelerator.unwrap_model(base, keep_fp32_wrapper=False)
    assert equal(convert_model(base), base, ids)


def wrapped(base):
    base.model.layers[0].self_attn.q_proj = torch.nn.Sequential(base.model.layers[0].self_attn.q_proj)


def patched(base):
    attention = base.model.layers[1].self_attn
    attention.forward = types.MethodType(lambda self, *args, **kwargs: (0.0, None), attention)


def replaced(base):
    base.model.layers[1].self_attn.__class__ = type("Other", (type(base.model.layers[1].self_attn),), {})


def offloaded(base):
    pytest.importorskip("accelerate").cpu_offload(base)


def resized(base):
    base.lm_head.weight = torch.nn.Parameter(torch.zeros(4, 32))


def pruned(base):
    base.model.layers = base.model.layers[:2]


def given_an_object(base):
    base.model.layers[1].self_attn.scaling = types.SimpleNamespace(value=1.0)


LOST = {
    "a forward hook": (lambda base: base.model.norm.register_forward_hook(print), "model.norm has a hook"),
    "a forward pre-hook": (lambda base: base.register_forward_pre_hook(print), "the model has a hook"),
    "a backward hook": (lambda base: base.model.register_full_backward_hook(print), "model has a hook"),
    "a backward pre-hook": (lambda base: base.register_full_backward_pre_hook(print), "has a hook"),
    "a state-dict hook": (lambda base: base.lm_head.register_state_dict_post_hook(patched), "lm_head has a hook"),
    "a state-dict pre-hook": (lambda base: base.register_state_dict_pre_hook(print), "has a hook"),
    "a loading hook": (lambda base: base.register_load_state_dict_pre_hook(print), "has a hook"),
    "a loading post-hook": (lambda base: base.register_load_state_dict_post_hook(print), "has a hook"),
    "a wrapper": (wrapped, "q_proj.0.weight has no counterpart. Merge or remove adapters and wrappers first"),
    "a patched forward": (patched, r"layers.1.self_attn has another 'forward' than its class, which a conversion"),
    "another class": (replaced, r"layers.1.self_attn has a module of class Other in the place of LlamaAttention"),
    "an added module": (lambda base: base.model.add_module("extra", torch.nn.Dropout()), "has a module of class Drop"),
    "a parametrisation": (lambda base: torch.nn.utils.parametrizations.orthogonal(base.lm_head), "no counterpart"),
    "weight norm": (lambda base: torch.nn.utils.parametrizations.weight_norm(base.lm_head), "no counterpart"),
    "another object": (given_an_object, r"layers.1.self_attn has another 'scaling' than its config says"),
    "offloading": (offloaded, "accelerate moves the weights of this LlamaForCausalLM between devices"),
    "another shape": (resized, r"lm_head.weight is \[4, 32\] where its config says \[96, 32\]"),
    "a layer less than its config": (pruned, "model.layers.2.self_attn.q_proj.weight is missing"),
}


class Helper:
    """What remote code may keep in a module."""

    def __init__(self, scale):
        self.scale = scale


def test_what_was_set_by_hand_comes_along(base):
    attention = base.model.layers[0].self_attn
    attention.sizes, attention.table, attention.activation = (1, [2]), torch.ones(2), partial(torch.clamp, min=0)
    attention.helper, attention.method, attention.itself = Helper(1.0), attention.forward, [attention]
    sources = dict(base.named_modules())
    targets = dict(deepcopy(base).named_modules())
    target = targets["model.layers.0.self_attn"]
    by_hand = SetByHand((module, targets[path]) for path, module in sources.items())
    # a tensor always, as on the meta device it would hold nothing
    assert {*by_hand.settings(attention)} == {"table"}

    changed = {"sizes": (1, [3]), "activation": torch.relu, "scaling": 0.5, "table": torch.zeros(2)}
    vars(attention).update(changed)
    assert by_hand.settings(attention) == changed
    target.helper.scale, target.method, target.itself = 2.0, target.extra_repr, [None]
    lost = {name for name, value in by_hand.settings(attention).items() if value is hand_settings.LOST}
    assert lost == {"helper", "method", "itself"}


@torch.no_grad()
def test_the_config_of_a_module_comes_along(base, ids):
    base.model.layers[1].self_attn.config = deepcopy(base.config)
    base.model.layers[1].self_attn.config._attn_implementation = "eager"
    model = convert_model(base)
    assert [layer.self_attn.config._attn_implementation for layer in model.model.layers[:2]] == ["sdpa", "eager"]
    assert model.model.layers[1].self_attn.config.connection == "dhc"
    assert equal(model, base, ids)


@torch.no_grad()
def test_settings_of_other_families_come_along(ids):
    sizes = {"vocab_size": 96, "num_hidden_layers": 2, "head_dim": 8, "initializer_range": 0.5}
    of_mamba = {"hidden_size": 32, "num_heads": 8, "state_size": 8, "n_groups": 1, "chunk_size": 8}
    of_gemma = {"hidden_size": 24, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2}
    mamba = Mamba2ForCausalLM(Mamba2Config(**sizes, **of_mamba)).eval()
    gemma = GemmaForCausalLM(GemmaConfig(**sizes, **of_gemma)).eval()
    before = [mamba(ids).logits, gemma(ids).logits]
    for layer in mamba.backbone.layers:
        layer.mixer.time_step_limit = (0.5, 1.0)
    for layer in gemma.model.layers:
        layer.mlp.act_fn.act = torch.relu
    for base, was in zip((mamba, gemma), before, strict=True):
        assert equal(convert_model(base), base, ids)
        assert not torch.equal(base(ids).logits, was)


@pytest.mark.parametrize(("change", "message"), LOST.values(), ids=LOST)
def test_what_would_be_lost_is_refused(change, message, base):
    change(base)
    before = [(name, id(parameter)) for name, parameter in base.named_parameters()]
    with pytest.raises(UnsupportedCheckpointError, match=message):
        convert_model(base)
    assert [(name, id(parameter)) for name, parameter in base.named_parameters()] == before


def test_layers_of_further_tokens_are_refused(llama, ids):
    with pytest.raises(ValueError, match=r"use_mtp must be False \(got True\)"):
        convert_model(llama).generate(ids[:1], max_new_tokens=2, use_mtp=True)


@pytest.mark.parametrize("loaded", [True, False])
def test_as_part_of_another_model_it_keeps_its_weights(loaded, llama, llama_folder):
    """`post_init` of the whole starts all parts that nobody has said to be started."""

    class Whole(PreTrainedModel):
        config_class, _supports_sdpa = LlamaConfig, True

        def __init__(self, part):
            super().__init__(part.config)
            self.part = part
            self.post_init()

    base = LlamaForCausalLM.from_pretrained(llama_folder) if loaded else LlamaForCausalLM(llama.config)
    converted = randomise_connections(convert_model(base, hc_mult=4))
    before = {name: value.clone() for name, value in converted.state_dict().items()}
    Whole(converted)
    converted.init_weights()
    assert all(torch.equal(value, before[name]) for name, value in converted.state_dict().items())


@pytest.mark.parametrize("start", ["copies", "history"])
def test_a_conversion_of_no_weights_is_started_where_it_gets_memory(start, llama):
    """As FSDP builds models: on the meta device, then `to_empty` and `init_weights`."""
    with torch.device("meta"):
        converted = convert_model(LlamaForCausalLM(llama.config), hc_mult=2, hc_start=start)
    converted.to_empty(device="cpu")
    for parameter in converted.parameters():
        torch.nn.init.constant_(parameter, 7)
    converted.init_weights()
    assert [name for name, parameter in converted.named_parameters() if (parameter == 7).all()] == []
