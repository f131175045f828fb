"""Which modules PEFT's methods adapt on a hyper-connection model: those that they adapt on its base."""

import subprocess
import sys
from copy import deepcopy

import pytest
import torch
from safetensors.torch import save_file

from hf_hyperconn import convert_model
from hf_hyperconn.models import transformers_seam

from .adapted import CONNECTIONS, logits, train
from .families import FAMILIES
from .tiny import tiny

peft = pytest.importorskip("peft")

EXPERTS = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
MIXTURES = ("olmoe", "mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss", "deepseek_v3")

# methods that take their targets from a table of model types, and fit the tiny models
METHODS = {
    "LORA": {},
    "ADALORA": {"total_step": 10},
    "IA3": {},
    "VERA": {},
    "LOHA": {},
    "LOKR": {},
    "OFT": {},
    "BOFT": {},
    "HRA": {},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2},
}


def random_lora(model, **fields):
    """The model in PEFT, with a LoRA that is not zero at the start."""
    torch.manual_seed(0)
    return peft.get_peft_model(model, peft.LoraConfig(r=2, init_lora_weights=False, **fields))


@pytest.mark.parametrize("method", METHODS)
def test_methods_need_no_targets_on_a_conversion(method, llama, ids):
    """They train as much as on the base, and compute the same at the same start."""
    config_class = peft.mapping.PEFT_TYPE_TO_CONFIG_MAPPING[method]
    adapted = []
    for model in (deepcopy(llama), convert_model(deepcopy(llama))):
        torch.manual_seed(0)
        model = peft.get_peft_model(model, config_class(task_type="CAUSAL_LM", **METHODS[method]))
        trainable = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
        adapted.append((trainable, logits(model, ids)))
    assert adapted[0][0].keys() == adapted[1][0].keys()
    assert len(adapted[0][0]) > 0
    assert adapted[0][0] == adapted[1][0]
    assert torch.equal(adapted[0][1], adapted[1][1])


@pytest.fixture(scope="module")
def loses_absent_targets() -> set[str]:
    """Families whose targets PEFT makes an empty set when there are none, as it does for Mixtral itself."""
    try:
        peft.get_peft_model(deepcopy(tiny("mixtral")), peft.LoraConfig())
    except ValueError:
        return {"mixtral", "olmoe", "qwen3_moe", "deepseek_v3"}
    return set()


@pytest.mark.parametrize("model_type", FAMILIES)
def test_lora_has_default_targets_for_every_family(model_type, loses_absent_targets, ids):
    if model_type in loses_absent_targets:
        pytest.skip("PEFT needs target_modules for types whose experts it translates, plain Mixtral among them")
    model = convert_model(deepcopy(tiny(model_type)))
    expected = logits(model, ids)
    model = peft.get_peft_model(model, peft.LoraConfig())
    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trainable) >= 2 * model.config.num_hidden_layers
    assert all(".self_attn." in name for name in trainable)
    assert torch.equal(logits(model, ids), expected)


@pytest.mark.parametrize("model_type", FAMILIES)
def test_every_table_of_peft_has_for_a_family_what_it_has_for_the_base(model_type):
    convert_model(deepcopy(tiny(model_type))).config.to_dict()
    tables = [
        table for name, table in vars(peft.utils.constants).items() if name.startswith("TRANSFORMERS_MODELS_TO_")
    ]
    assert sum("llama" in table for table in tables) > 20
    for table in tables:
        if model_type in table:
            assert table[f"hc_{model_type}"] == table[model_type]


def test_lora_targets_are_listed_for_the_families_that_peft_has_none_for():
    known = peft.utils.constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING
    assert FAMILIES.keys() - known.keys() <= transformers_seam.LORA_TARGETS.keys() <= FAMILIES.keys()
    assert known["llama"] == transformers_seam.LORA_TARGETS["olmo"]


@pytest.mark.slow
def test_importing_this_package_does_not_import_peft_and_the_order_does_not_matter():
    code = """
import sys
import hf_hyperconn
assert "peft" not in sys.modules
model = hf_hyperconn.HCLlamaForCausalLM(hf_hyperconn.HCLlamaConfig(
    hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2, vocab_size=8
))
assert "peft" not in sys.modules
import peft
model = peft.get_peft_model(model, peft.LoraConfig())
assert model.peft_config["default"].target_modules == {"q_proj", "v_proj"}
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("model_type", MIXTURES)
def test_expert_parameters_take_adapters_of_the_base(model_type, ids, tmp_path):
    base = random_lora(deepcopy(tiny(model_type)), target_modules=["q_proj"], target_parameters=EXPERTS)
    expected = logits(base, ids)
    assert not torch.equal(expected, logits(tiny(model_type), ids))
    base.save_pretrained(tmp_path)
    converted = peft.PeftModel.from_pretrained(convert_model(deepcopy(tiny(model_type))), tmp_path)
    assert torch.equal(logits(converted, ids), expected)
    assert torch.equal(logits(converted.merge_and_unload(), ids), logits(base.merge_and_unload(), ids))


@pytest.mark.parametrize("model_type", MIXTURES)
def test_experts_train_with_their_connections(model_type, ids, tmp_path):
    model = convert_model(deepcopy(tiny(model_type)))
    config = peft.LoraConfig(target_modules=["q_proj"], target_parameters=EXPERTS, modules_to_save=CONNECTIONS)
    model = peft.get_peft_model(model, config)
    losses = train(model, ids)
    assert losses[-1] < losses[0]
    model.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(convert_model(deepcopy(tiny(model_type))), tmp_path)
    assert torch.equal(logits(again, ids), logits(model, ids))


OLD_NAMES = {"mixtral": ["w1", "w2", "w3"], **dict.fromkeys(("olmoe", "qwen3_moe", "deepseek_v3"), None)}


@pytest.mark.parametrize("model_type", OLD_NAMES)
def test_adapters_with_a_module_for_each_expert_are_translated_as_for_the_base(model_type, ids, tmp_path):
    """Written when an expert was modules of its own: by their names as targets, and with a LoRA of each."""
    gate, down, up = OLD_NAMES[model_type] or ["gate_proj", "down_proj", "up_proj"]
    targets = ["q_proj", "q_a_proj", gate, down, up]
    config = peft.LoraConfig(r=2, target_modules=targets)
    config.save_pretrained(tmp_path)
    base = tiny(model_type)
    save_file(old_adapter(base, (gate, up), down), tmp_path / "adapter_model.safetensors")
    expected = logits(peft.PeftModel.from_pretrained(deepcopy(base), tmp_path), ids)
    assert not torch.equal(expected, logits(base, ids))
    converted = peft.PeftModel.from_pretrained(convert_model(deepcopy(base)), tmp_path)
    assert converted.peft_config["default"].target_parameters == {"gate_up_proj", "down_proj"}
    assert torch.equal(logits(converted, ids), expected)


def old_adapter(base, fused: tuple[str, str], down: str) -> dict[str, torch.Tensor]:
    """A random LoRA of rank 2 on the experts of a base, one for each."""
    generator = torch.Generator().manual_seed(0)
    block = "block_sparse_moe" if base.config.model_type == "mixtral" else "mlp"
    tensors = {}
    for i, layer in enumerate(base.model.layers):
        experts = getattr(layer.mlp, "experts", None)
        if experts is None:
            continue
        count, size, inner = experts.down_proj.shape
        for name, (outputs, inputs) in {**dict.fromkeys(fused, (inner, size)), down: (size, inner)}.items():
            for j in range(count):
                path = f"base_model.model.model.layers.{i}.{block}.experts.{j}.{name}"
                tensors[f"{path}.lora_A.weight"] = torch.randn(2, inputs, generator=generator)
                tensors[f"{path}.lora_B.weight"] = torch.randn(outputs, 2, generator=generator)
    return tensors
