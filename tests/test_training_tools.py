"""What training tools do to connections past their modules: it is undone, refused or told."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from types import ModuleType, SimpleNamespace

import pytest
import torch
from accelerate import init_empty_weights, load_checkpoint_and_dispatch
from liger_kernel.transformers.rms_norm import LigerRMSNorm, LigerRMSNormForGemma
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, HyperCLOVAXConfig, HyperCLOVAXForCausalLM
from transformers.trainer_pt_utils import LayerWiseDummyOptimizer
from transformers.utils import logging
from trl.trainer.utils import add_fused_lm_head

from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM, HCTrainer, convert_model, hc_param_groups, load_hc, save_hc
from hf_hyperconn.errors import HyperConnError
from hf_hyperconn.models.connection_weights import fresh_copy
from hf_hyperconn.models.hyper_connections import HyperConnection
from hf_hyperconn.models.norm_forms import form_of
from hf_hyperconn.models.sub_layers import is_of_connection
from hf_hyperconn.models.transformers_seam import share_tables
from hf_hyperconn.training.deepspeed import refuse_cast_by_zero_init, use_autocast

from .conftest import TINY, hc_llama, randomise_connections
from .isolated import printed
from .test_param_groups import trainer_of

TOLD = "There are connections in bfloat16, where 1.003 is 1"
CAST = "for parameter in model.parameters(): parameter.data = parameter.data.to(torch.bfloat16)"  # as DeepSpeed does


@pytest.fixture
def told(caplog, monkeypatch):
    """How often it was told, by a logger that has told nothing yet."""
    logging.get_logger("transformers").warning_once.__func__.cache_clear()
    return lambda text=TOLD: caplog.text.count(text)


def cast_each(model):
    for parameter in model.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    return model


def folder_of(model, place):
    model.save_pretrained(place)
    return place


@pytest.mark.parametrize(
    "fields", [{}, {"connection": "mhc", "hc_readout": "learned"}, {"connection": "shc"}], ids=str
)
def test_connections_that_were_cast_one_by_one_are_told_at_the_first_forward(fields, ids, told):
    model = hc_llama(**fields)
    model(ids)
    model.bfloat16()(ids)
    assert told() == 0  # modules keep their connections
    cast_each(model)
    for _ in range(2):
        model(ids)
    assert told() == 1


def test_they_are_told_when_they_are_saved_and_loaded(tmp_path, told):
    """With the model, and apart."""
    hc_llama().save_pretrained(tmp_path)
    assert told() == 0
    calls = (
        lambda: cast_each(hc_llama()).save_pretrained(tmp_path),
        lambda: save_hc(cast_each(hc_llama()), tmp_path),
        lambda: load_hc(hc_llama(), tmp_path),
    )
    for count, call in enumerate(calls, start=1):
        logging.get_logger("transformers").warning_once.__func__.cache_clear()
        call()
        assert told() == count


def test_a_folder_with_connections_in_16_bits_is_told_when_it_is_loaded(tmp_path, told):
    """As mergekit writes it with `dtype: bfloat16`; in memory they are float32 again, but rounded."""
    folder = folder_of(randomise_connections(hc_llama()), tmp_path)
    HCLlamaForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    assert told() == 0
    file = folder / "model.safetensors"
    save_file({name: tensor.bfloat16() for name, tensor in load_file(file).items()}, file, {"format": "pt"})
    model = HCLlamaForCausalLM.from_pretrained(folder)
    assert {p.dtype for name, p in model.named_parameters() if is_of_connection(name)} == {torch.float32}
    assert told() == 1


def test_what_accelerate_dispatches_in_16_bits_is_told(ids, tmp_path, told):
    folder = folder_of(hc_llama(), tmp_path)
    with init_empty_weights():
        empty = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    model = load_checkpoint_and_dispatch(empty, folder, device_map={"": "cpu"}, dtype=torch.bfloat16)
    model(ids)
    assert told() == 1


def test_a_folder_tells_it_without_this_package(tmp_path):
    folder_of(hc_llama(), tmp_path / "out")
    lines = (
        "import sys, torch",
        "from transformers import AutoModelForCausalLM",
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)",
        "from transformers.utils import logging",
        "told = []",
        "logging.get_logger('transformers').addFilter(lambda record: told.append(record.getMessage()) or True)",
        "logging.get_logger(type(model.model).__module__.rpartition('.')[0] + '.connection_weights').addFilter("
        "lambda record: told.append(record.getMessage()) or True)",
        CAST,
        "model.train()(torch.tensor([[1, 2, 3]]))",
        "print(told)",
    )
    assert printed("\n".join(lines), tmp_path / "out", place=tmp_path).count(TOLD) == 1


@pytest.mark.slow
def test_a_compiled_forward_does_not_look(ids, told):
    model = hc_llama()
    expected = model(ids).logits
    torch._dynamo.reset()
    assert torch.equal(torch.compile(model, backend="eager", fullgraph=True)(ids).logits, expected)
    assert told() == 0


def plugin(**sections) -> SimpleNamespace:
    return SimpleNamespace(deepspeed_config=sections, hf_ds_config=SimpleNamespace(_dtype=torch.bfloat16))


def test_the_trainer_puts_autocast_in_the_place_of_a_cast():
    casting = plugin(bf16={"enabled": True}, zero_optimization={"stage": 2})
    use_autocast(casting)
    assert casting.deepspeed_config == {
        "bf16": {"enabled": False},
        "zero_optimization": {"stage": 2},
        "torch_autocast": {"enabled": True, "dtype": "bfloat16"},
    }
    assert casting.hf_ds_config._dtype == torch.float32
    for sections in ({"bf16": {"enabled": False}, "fp16": {"enabled": False}}, {}):
        unchanged = plugin(**sections)
        use_autocast(unchanged)
        assert unchanged.deepspeed_config == sections
    with pytest.raises(HyperConnError, match=r"DeepSpeed's fp16 casts every parameter.* Use bf16=True"):
        use_autocast(plugin(fp16={"enabled": True}))


def test_a_model_that_zero_init_has_cast_is_refused():
    model = hc_llama()
    refuse_cast_by_zero_init(cast_each(model))  # by something else, which is told
    for parameter in model.parameters():
        parameter.ds_shape = parameter.shape
    message = r'attn_hc.static_alpha in bfloat16.*"torch_autocast": {"enabled": true'
    with pytest.raises(HyperConnError, match=message):
        refuse_cast_by_zero_init(model)
    model.float()
    refuse_cast_by_zero_init(model)


def test_a_norm_that_zero_3_has_split_is_gathered_to_be_copied(monkeypatch):
    values = torch.randn(8)
    norm = nn.RMSNorm(8)
    norm.weight.ds_shape, norm.weight.data = norm.weight.shape, torch.empty(0)

    @contextmanager
    def gathered(parameters, modifier_rank) -> Iterator[None]:
        assert modifier_rank is None
        for parameter in parameters:
            parameter.data = values
        yield
        for parameter in parameters:
            parameter.data = torch.empty(0)

    deepspeed = ModuleType("deepspeed")
    deepspeed.zero = SimpleNamespace(GatheredParameters=gathered)
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    assert torch.equal(fresh_copy(norm).weight, values)
    assert norm.weight.numel() == 0


def layer_wise(trainer, **settings):
    """An optimizer for each parameter, of which the Trainer has an empty one, as galore_adamw_layerwise makes it."""
    trainer.optimizer_cls_and_kwargs = (LayerWiseDummyOptimizer, {"optimizer_dict": {}, "lr": 1e-3, **settings})
    return trainer


def test_a_rate_that_an_optimizer_does_not_take_is_refused(tmp_path):
    layer_wise(trainer_of(HCTrainer, hc_llama(), tmp_path)).create_optimizer()
    message = r"hc_lr=0.01 has no effect on .*attn_hc.static_alpha.*has no group with it"
    with pytest.raises(HyperConnError, match=message):
        layer_wise(trainer_of(HCTrainer, hc_llama(), tmp_path, hc_lr=1e-2)).create_optimizer()


def test_a_decay_that_meets_static_matrices_is_refused(tmp_path):
    model = hc_llama()
    trainer = trainer_of(HCTrainer, model, tmp_path)
    every = [{"params": [*model.parameters()], "weight_decay": 0.1}]
    trainer.optimizer_cls_and_kwargs = (torch.optim.AdamW, {"params": every, "lr": 1e-3})
    with pytest.raises(HyperConnError, match="applies a weight decay to model.layers.0.attn_hc.static_alpha"):
        trainer.create_optimizer()


UNDECAYED = {"type": "AdamW", "params": {"weight_decay": 0.0}}
DECAYED = {"type": "AdamW", "params": {"weight_decay": 0.1}}


@pytest.mark.parametrize(
    ("sections", "hc_lr", "message"),
    [
        ({"optimizer": UNDECAYED}, 1e-2, "a section optimizer, which gives all"),
        ({"optimizer": DECAYED}, None, "a section optimizer, which gives all"),
        ({"scheduler": {}}, 1e-2, "a section scheduler, which gives all"),
        ({"optimizer": {}, "scheduler": {}}, 1e-2, "optimizer and a section scheduler, which give all"),
        ({"optimizer": UNDECAYED}, None, None),
        ({"scheduler": {}}, None, None),
        ({}, 1e-2, None),
    ],
)
def test_sections_of_deepspeed_that_would_lose_a_rate_are_refused(sections, hc_lr, message, tmp_path):
    trainer = trainer_of(HCTrainer, hc_llama(), tmp_path, hc_lr=hc_lr)
    trainer.is_deepspeed_enabled = True
    trainer.accelerator = SimpleNamespace(state=SimpleNamespace(deepspeed_plugin=plugin(**sections)))
    if "optimizer" in sections:
        trainer.optimizer = SimpleNamespace()  # a stand-in that accelerate puts there, without groups
    with nullcontext() if message is None else pytest.raises(HyperConnError, match=message):
        trainer.create_optimizer()


def test_a_model_without_connections_is_told(llama, tmp_path, caplog):
    base = deepcopy(llama)
    calls = (
        lambda hc_lr: hc_param_groups(base, 1e-3, 0.1, hc_lr=hc_lr),
        lambda hc_lr: trainer_of(HCTrainer, base, tmp_path, hc_lr=hc_lr),
    )
    for call in calls:
        with pytest.raises(HyperConnError, match="LlamaForCausalLM has no hyper-connections. Convert it first"):
            call(1e-2)
        caplog.clear()
        call(None)
        assert "LlamaForCausalLM has no hyper-connections" in caplog.text
    caplog.clear()
    trainer_of(HCTrainer, hc_llama(connection="keel", hc_mult=1), tmp_path)
    assert not caplog.text


def test_a_field_that_a_config_does_not_have_is_refused():
    for name in ("n", "hc_mutl", "hc_n", "start", "num_residual_streams"):
        message = f"HCLlamaConfig has no field {name}. Use hc_mult for the number of streams"
        with pytest.raises(ValueError, match=message):
            HCLlamaConfig(**{name: 4})
    # what stands in a folder is not asked for
    assert HCLlamaConfig.from_dict({"n": 8, "hc_base_model": "a/b", "hc_mult": 2}).hc_mult == 2
    assert HCLlamaConfig.from_prenorm(AutoConfig.for_model("llama", n=8), hc_mult=2).hc_mult == 2
    with pytest.raises(ValueError, match="has no field n"):
        HCLlamaConfig.from_prenorm(AutoConfig.for_model("llama"), n=2)
    with pytest.raises(ValueError, match="HCLlamaConfig has no field start"):
        HCLlamaForCausalLM.from_prenorm("not read", start="history")


def test_from_prenorm_names_the_way_for_what_is_no_base(llama):
    with pytest.raises(TypeError, match=r"\(got a LlamaForCausalLM\). Call convert_model on a model."):
        HCLlamaForCausalLM.from_prenorm(llama)
    with pytest.raises(ValueError, match=r"no connections \(got a 'hc_llama'\). Load it by from_pretrained."):
        HCLlamaConfig.from_prenorm(HCLlamaConfig())


class OnAGpuAlone(nn.RMSNorm):
    """Of a library that is not known."""

    def forward(self, x):
        if x.dim() == 4:  # streams
            return super().forward(x)
        raise RuntimeError("0 active drivers")


def test_norms_of_kernels_are_known_by_what_they_say_or_called(ids):
    for norm, added in ((LigerRMSNorm(8, eps=1e-3), 0.0), (LigerRMSNormForGemma(8, eps=1e-3), 1.0)):
        form = form_of(norm, 8)
        assert (form.eps, form.centred, form.added, form.has_bias) == (1e-3, False, added, False)
    another = type("LigerRMSNorm", (LigerRMSNorm,), {"__module__": "somewhere"})
    assert form_of(another(8), 8) is None

    model = randomise_connections(hc_llama(hc_mult=4))
    expected = model(ids).logits
    for module in model.modules():
        if isinstance(module, HyperConnection):
            norm = OnAGpuAlone(module.norm.weight.shape[0], eps=module.norm.variance_epsilon)
            norm.weight = module.norm.weight
            module.norm = norm
            assert module.coefficient_parameters(torch.float32) is None
    torch.testing.assert_close(model(ids).logits, expected)


def test_an_engine_s_norm_is_known_by_what_it_says():
    class RMSNorm(nn.Module):
        def __init__(self, override):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(8))
            self.variance_epsilon, self.variance_size_override = 1e-3, override

        def forward(self, x):
            raise RuntimeError("runs on a GPU alone")

    RMSNorm.__module__ = "vllm.model_executor.layers.layernorm"
    assert form_of(RMSNorm(None), 8).eps == 1e-3
    assert form_of(RMSNorm(4), 8) is None


@pytest.mark.parametrize("names", [["attn_hc", "mlp_hc"], ["attn_hc", "mlp_hc", "hc_head"]])
def test_a_readout_that_peft_leaves_frozen_is_told(names, ids, told):
    model = hc_llama(hc_start="history", hc_readout="weighted")
    adapted = get_peft_model(model, LoraConfig(modules_to_save=names, task_type="CAUSAL_LM")).train()
    adapted(ids, labels=ids).loss.backward()
    assert told("their readout, hc_head, is frozen") == ("hc_head" not in names)


def test_nothing_is_told_of_a_readout_that_is_trained_or_all_that_is_frozen(ids, told):
    for prepare in (lambda model: model, lambda model: model.requires_grad_(False), lambda model: model.eval()):
        prepare(hc_llama(hc_start="history", hc_readout="weighted"))(ids)
    assert told("readout") == 0


def test_trl_scales_the_logits_of_hyperclovax_as_its_base_does(ids):
    base = HyperCLOVAXForCausalLM(HyperCLOVAXConfig(**TINY, logits_scaling=4.0)).eval()
    model = convert_model(base, hc_mult=2).eval()
    assert model.config.logit_scale == 4.0
    assert "logit_scale" not in model.config.to_dict()
    assert not hasattr(hc_llama().config, "logit_scale")
    losses = []
    for patched in (base, model):
        add_fused_lm_head(patched)
        losses.append(patched(ids, labels=ids, fused_lm_head=True).loss)
    assert torch.equal(*losses)


def test_liger_knows_what_a_folder_loads_without_this_package(tmp_path):
    """Also when it is imported after that, as by the Trainer."""
    folder_of(hc_llama(), tmp_path / "out")
    lines = (
        "import sys",
        "from transformers import AutoModelForCausalLM",
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1], trust_remote_code=True)",
        "assert 'liger_kernel' not in sys.modules",
        "from liger_kernel.transformers.monkey_patch import _apply_liger_kernel_to_instance",
        "_apply_liger_kernel_to_instance(model)",
        "print(model.forward.__func__.__module__, model.model.layers[0].mlp._get_name())",
    )
    printed_by_it = printed("\n".join(lines), tmp_path / "out", place=tmp_path)
    assert printed_by_it.split()[-2:] == ["liger_kernel.transformers.model.llama", "LigerSwiGLUMLP"]


def test_a_config_may_be_told_another_type():
    config = HCLlamaConfig()
    config.model_type = "another"
    assert (config.model_type, HCLlamaConfig.model_type, deepcopy(config).model_type) == (
        "another",
        "hc_llama",
        "another",
    )
    assert HCLlamaConfig().to_dict()["model_type"] == "hc_llama"


def test_llama_factory_finds_the_towers_of_a_conversion(monkeypatch):
    module = ModuleType("llamafactory.model.model_utils.visual")
    module.COMPOSITE_MODELS = {"llava": object()}
    monkeypatch.setitem(sys.modules, module.__name__, module)
    share_tables("hc_llava", "llava")
    assert module.COMPOSITE_MODELS["hc_llava"] is module.COMPOSITE_MODELS["llava"]
