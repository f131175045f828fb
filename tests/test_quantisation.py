"""Quantised models keep their connections as they are, and take adapters."""

import pytest
import torch
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaForCausalLM

from hf_hyperconn import convert_model, hc_parameters, load_hc, save_hc

from .adapted import CONNECTIONS, logits, train
from .conftest import llama_config

peft = pytest.importorskip("peft")


def torchao_int8():
    pytest.importorskip("torchao")
    from torchao.quantization import Int8WeightOnlyConfig
    from transformers import TorchAoConfig

    return TorchAoConfig(Int8WeightOnlyConfig())


def bitsandbytes(**fields) -> BitsAndBytesConfig:
    pytest.importorskip("bitsandbytes")
    return BitsAndBytesConfig(**fields)


QUANTISATIONS = {
    "torchao int8": torchao_int8,
    "bitsandbytes nf4": lambda: bitsandbytes(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True
    ),
    "bitsandbytes int8": lambda: bitsandbytes(load_in_8bit=True),
}


@pytest.mark.slow
@pytest.mark.parametrize("quantisation", QUANTISATIONS)
def test_quantisation_leaves_connections_alone(quantisation, ids, tmp_path):
    """LoRA and the connections train on top, and the small file goes to and from the model in full precision."""
    config = QUANTISATIONS[quantisation]()
    torch.manual_seed(0)
    # sizes that bitsandbytes can pack
    base = LlamaForCausalLM(llama_config(hidden_size=64, intermediate_size=128, initializer_range=0.2)).bfloat16()
    whole = convert_model(base)
    whole.save_pretrained(tmp_path / "converted")

    def load():
        return AutoModelForCausalLM.from_pretrained(
            tmp_path / "converted", quantization_config=config, dtype=torch.bfloat16
        )

    model = load()
    weight = model.model.layers[0].self_attn.q_proj.weight
    assert type(weight) is not torch.nn.Parameter or type(weight.data) is not torch.Tensor
    assert hc_parameters(model).keys() == hc_parameters(whole).keys()
    for name, parameter in hc_parameters(model).items():
        assert type(parameter) is torch.nn.Parameter
        assert type(parameter.data) is torch.Tensor
        assert parameter.dtype == torch.float32
        assert torch.equal(parameter, whole.get_parameter(name))

    model = peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
    model = peft.get_peft_model(model, peft.LoraConfig(modules_to_save=CONNECTIONS))
    losses = train(model, ids, steps=5)
    assert losses[-1] < losses[0] - 0.5
    trained = hc_parameters(model)
    assert not any(torch.equal(value, whole.get_parameter(name)) for name, value in trained.items() if "beta" in name)

    file = save_hc(model, tmp_path)
    model.save_pretrained(tmp_path / "adapter")
    again = peft.prepare_model_for_kbit_training(load(), use_gradient_checkpointing=False)
    again = peft.PeftModel.from_pretrained(again, tmp_path / "adapter")
    assert torch.equal(logits(again, ids), logits(model, ids))
    for target in (whole, load()):
        load_hc(target, file)
        assert all(torch.equal(value, target.get_parameter(name)) for name, value in trained.items())
