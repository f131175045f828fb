"""Liger's kernels on a conversion: whichever way they get there, they are those of its base, with its losses."""

import inspect
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaForCausalLM, Trainer, TrainingArguments
from transformers.models.llama import modeling_llama

from hf_hyperconn import convert_model
from hf_hyperconn.models.hyper_connections import HyperConnection
from tests import other_families
from tests.conftest import hc_llama, llama_config
from tests.families import FAMILIES
from tests.marks import few
from tests.tiny import tiny
from tests.tolerances import FLOAT32
from tests.triton.common import DEVICE

liger = pytest.importorskip("liger_kernel.transformers")
from liger_kernel.ops import rms_norm  # noqa: E402
from liger_kernel.transformers import monkey_patch  # noqa: E402

if os.environ.get("TRITON_INTERPRET") == "1":
    import triton.language as tl
    from triton.runtime import interpreter

    convert = interpreter._implicit_cvt

    def convert_floats_too(argument):
        if not isinstance(argument, float):
            return convert(argument)
        return tl.tensor(interpreter.TensorHandle(np.array([argument], np.float32), tl.float32), tl.float32)

    interpreter._implicit_cvt = convert_floats_too
    rms_norm.rsqrt = lambda x: tl.rsqrt(x)  # that of CUDA's library returns None there

SIZES = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
IDS = torch.randint(3, 96, (1, 6), generator=torch.Generator().manual_seed(0))
# Liger 0.8.5 can't patch the base itself, or there is no tiny model of it
LEFT_OUT = ("deepseek_v4", "glm4v_moe", "mllama", "mllama_text_model", "qwen3_moe")
LEFT_OUT += ("qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text", "qwen3_vl", "qwen3_vl_text")
KNOWN = [name for name in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN if name[:3] != "hc_" and name not in LEFT_OUT]


@contextmanager
def patched_for_a_while() -> Iterator[None]:
    """Liger changes the modules of Transformers for good; here they are as before afterwards."""
    torch.use_deterministic_algorithms(False)
    owners = [module for name, module in sys.modules.items() if name.startswith("transformers.models.")]
    kept = [(owner, dict(vars(owner))) for owner in (*owners, LlamaForCausalLM)]
    try:
        yield
    finally:
        for owner, names in kept:
            for name, value in names.items():
                if vars(owner)[name] is not value:
                    setattr(owner, name, value)


@pytest.fixture(autouse=True)
def unpatched() -> Iterator[None]:
    with patched_for_a_while():
        yield


@pytest.fixture
def folders(tmp_path) -> list[str]:
    """A base and its conversion."""
    torch.manual_seed(0)
    base = LlamaForCausalLM(llama_config(**SIZES, num_key_value_heads=1, initializer_range=0.2))
    for name, model in (("base", base), ("hc", convert_model(base, hc_mult=2))):
        model.save_pretrained(tmp_path / name)
    return [str(tmp_path / name) for name in ("base", "hc")]


def patched(model) -> dict[str, str]:
    """Which functions stand in the place of a class's, by module and name."""
    return {
        f"{path}.{name}": f"{value.__func__.__module__}.{value.__func__.__qualname__}"
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if inspect.ismethod(value)
    }


def loss_and_gradients(model) -> list[torch.Tensor]:
    """The loss in training, and the gradients of the first layer's branches."""
    model = model.to(DEVICE).train()
    loss = model(IDS.to(DEVICE), labels=IDS.to(DEVICE)).loss
    loss.backward()
    layer = model.model.layers[0]
    return [loss, layer.self_attn.q_proj.weight.grad, layer.mlp.up_proj.weight.grad, layer.input_layernorm.weight.grad]


def after_the_call(folder: str):
    liger.apply_liger_kernel_to_llama()
    return AutoModelForCausalLM.from_pretrained(folder)


BEFORE = {
    "apply_liger_kernel_to_llama": after_the_call,
    "AutoLigerKernelForCausalLM": liger.AutoLigerKernelForCausalLM.from_pretrained,
}
AFTER = {
    "apply_liger_kernel_to_llama(model=...)": lambda model: liger.apply_liger_kernel_to_llama(model=model),
    "_apply_liger_kernel_to_instance": monkey_patch._apply_liger_kernel_to_instance,
}


@pytest.mark.parametrize("way", few([*BEFORE, *AFTER], "apply_liger_kernel_to_llama", *[*AFTER][1:]))
def test_losses_are_those_of_the_base_with_liger(way, folders):
    base, model = models = [BEFORE.get(way, AutoModelForCausalLM.from_pretrained)(folder) for folder in folders]
    if way in AFTER:
        for loaded in models:
            AFTER[way](loaded)
    assert "liger_kernel" in base.forward.__func__.__module__
    assert model.forward.__func__ is base.forward.__func__
    assert modeling_llama.apply_rotary_pos_emb is liger.liger_rotary_pos_emb
    assert patched(model) == patched(base)
    for path, module in base.named_modules():
        if path.endswith(("norm", "mlp")):
            assert "liger" in module._get_name().lower()
            assert type(model.get_submodule(path)) is type(module)
    ours, theirs = loss_and_gradients(model), loss_and_gradients(base)
    assert torch.equal(ours[0], theirs[0])
    for mine, other in zip(ours[1:], theirs[1:], strict=True):
        torch.testing.assert_close(mine, other, **FLOAT32)
    connections = [module for module in model.modules() if isinstance(module, HyperConnection)]
    assert len(connections) == 2
    assert all(connection.coefficient_parameters(torch.float32) is not None for connection in connections)


def test_the_trainer_has_liger_for_a_conversion(folders, tmp_path, monkeypatch):
    """Also when it is the first to import Liger."""
    losses = []
    for folder in folders:
        model = AutoModelForCausalLM.from_pretrained(folder)
        monkeypatch.delitem(monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN, "hc_llama", raising=False)
        args = TrainingArguments(
            str(tmp_path / "out"), max_steps=1, use_liger_kernel=True, report_to=[], logging_steps=1, bf16=False,
            save_strategy="no", disable_tqdm=True, use_cpu=DEVICE == "cpu",
        )  # fmt: skip
        trainer = Trainer(model, args, train_dataset=[{"input_ids": IDS[0], "labels": IDS[0]}] * 2)
        trainer.train()
        assert model.forward.__func__.__module__ == "liger_kernel.transformers.model.llama"
        losses.append(trainer.state.log_history[0]["loss"])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("model_type", few(KNOWN, "llama", "gemma2", "olmo2"))
def test_each_module_that_is_patched_in_a_base_is_patched_in_its_conversion(model_type):
    make = tiny if model_type in FAMILIES else other_families.tiny
    models = deepcopy(make(model_type)), convert_model(deepcopy(make(model_type)), hc_mult=2)
    before = patched(models[0])
    with patched_for_a_while():
        for model in models:
            monkey_patch._apply_liger_kernel_to_instance(model)
    base, ours = map(patched, models)
    assert ours == base != before


def test_functions_in_the_place_of_norms_refuse_its_norm():
    for apply in (monkey_patch._apply_liger_kernel_to_instance, liger.apply_liger_kernel_to_llama):
        with pytest.raises(ValueError, match="dyt is no RMSNorm.* Give rms_norm=False"):
            apply(model=hc_llama(norm="dyt"))
        apply(model=hc_llama(norm="dyt"), rms_norm=False)
