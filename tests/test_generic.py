"""Families without files of their own: hyper-connections cut from the layer's own forward, in memory."""

import dataclasses
import re

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hf_hyperconn import convert_model
from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.families import FAMILIES
from hf_hyperconn.generic import check_layer_loop, split_branches

from .conftest import llama_config
from .support import in_memory, section

# asked of every config that knows the field
FIELDS = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.2,
    "sliding_window": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "moe_num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "num_shared_experts": 1,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "query_pre_attn_scalar": 8,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LATENT_ATTENTION = ["axk1", "axk2", "deepseek_v2", "deepseek_v32", "glm4_moe_lite", "minicpm3", "youtu"]
COMMON = [
    "apertus",
    "deepseek_v2",
    "ernie4_5",
    "exaone4",
    "gemma3_text",
    "glm4",
    "granitemoe",
    "minimax_m2",
    "nemotron",
]
LONG_TAIL = in_memory()
REFUSED = {
    "cohere": "CohereDecoderLayer",
    "phi": "PhiDecoderLayer",
    "gptj": "GPTJBlock",
    "minimax": "MiniMaxDecoderLayer",
    "gemma4": "Gemma4TextDecoderLayer",
    "llama4": "Llama4TextDecoderLayer",
    "longcat_flash": "LongcatFlashDecoderLayer",
    "falcon_mamba": "FalconMambaBlock",
    "doge": "DogeDecoderLayer",
    "opt": "OPTDecoderLayer",
    "gpt2": "GPT2Block",
}
IDS = torch.randint(3, 96, (2, 24), generator=torch.Generator().manual_seed(0))


def tiny(model_type: str):
    """A random model of any family that the installed Transformers has."""
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        pytest.skip(f"this Transformers has no {model_type}")
    config_class = CONFIG_MAPPING[model_type]
    known = {field.name for field in dataclasses.fields(config_class)} | set(dir(config_class))
    config = config_class(**{name: value for name, value in FIELDS.items() if name in known})
    if model_type in LATENT_ATTENTION:
        config.num_key_value_heads = config.num_attention_heads
    torch.manual_seed(0)
    model = getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type])(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize(
    "model_type", [name if name in COMMON else pytest.param(name, marks=pytest.mark.slow) for name in LONG_TAIL]
)
@torch.no_grad()
def test_equal_to_the_base(model_type):
    base = tiny(model_type)
    assert model_type not in FAMILIES
    settings = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "pad_token_id": 0}
    for dtype in (torch.float32, torch.bfloat16):
        base.to(dtype)
        converted = convert_model(base, hc_mult=4)
        assert type(converted).__name__ == f"HC{type(base).__name__}"
        assert all("Norm" in type(layer.attn_hc.norm).__name__ for layer in converted.base_model.layers)
        expected, found = (model(IDS, output_hidden_states=True) for model in (base, converted))
        assert torch.equal(found.logits, expected.logits)
        assert len(found.hidden_states) == len(expected.hidden_states)
        assert all(map(torch.equal, found.hidden_states, expected.hidden_states))
        assert torch.equal(converted.generate(IDS, **settings), base.generate(IDS, **settings))


@pytest.mark.parametrize("family", FAMILIES.values(), ids=lambda family: family.name)
@torch.no_grad()
def test_the_cut_branches_compute_what_the_familys_file_says(family):
    """On trained streams, which differ: a family's own file against the branches of its base's forward."""
    from .tiny import tiny as tiny_of_family

    layer = convert_model(tiny_of_family(family.model_type)).base_model.layers[1]
    attention_branch, mlp_branch = split_branches(type(layer).__mro__[2])
    hidden_states = torch.randn(2, 5, 32)
    assert torch.equal(mlp_branch(layer, hidden_states), layer.mlp_branch(hidden_states))
    seen = {}

    class Attention(nn.Module):
        def forward(self, hidden_states, **kwargs):
            seen[len(seen)] = kwargs
            return hidden_states.sin(), None

    layer.self_attn = Attention()
    kwargs = dict.fromkeys(("attention_mask", "position_ids", "past_key_values", "position_embeddings"), torch.ones(1))
    kwargs["something_else"] = torch.ones(1)
    found = layer.attention_branch(hidden_states, **kwargs)
    assert torch.equal(attention_branch(layer, hidden_states, **kwargs), found)
    assert seen[0].items() <= seen[1].items()
    assert not any(seen[1][name] for name in seen[1].keys() - seen[0].keys())


@pytest.mark.parametrize(("model_type", "layer"), REFUSED.items())
def test_another_form_is_refused(model_type, layer):
    name = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type]
    module = __import__(getattr(transformers, name).__module__, fromlist=[layer])
    with pytest.raises(UnsupportedCheckpointError, match=f"the forward of {layer} is not two branches"):
        split_branches(getattr(module, layer))


class Layer(nn.Module):
    """The form, once more: what the next layers change."""

    def forward(self, hidden_states, scale=2.0):
        residual = hidden_states
        half = hidden_states / 2
        hidden_states = residual + half * scale
        residual = hidden_states
        hidden_states = hidden_states**2
        hidden_states = residual + hidden_states
        return hidden_states


class UsesAnArgumentTwice(nn.Module):
    def forward(self, hidden_states, scale=2.0):
        residual = hidden_states
        hidden_states = residual + hidden_states * scale
        residual = hidden_states
        hidden_states = residual + hidden_states * scale
        return hidden_states


class CarriesOver(nn.Module):
    def forward(self, hidden_states):
        residual = hidden_states
        half = hidden_states / 2
        hidden_states = residual + half
        residual = hidden_states
        hidden_states = residual + half
        return hidden_states


class ScalesTheResidual(nn.Module):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = residual * 2 + hidden_states
        residual = hidden_states
        hidden_states = residual + hidden_states
        return hidden_states


class ReadsTheResidual(nn.Module):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = hidden_states / residual
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = residual + hidden_states
        return hidden_states


class NormsTheResidual(nn.Module):
    def forward(self, hidden_states):
        hidden_states = hidden_states / 2
        residual = hidden_states
        hidden_states = residual + hidden_states
        residual = hidden_states
        hidden_states = residual + hidden_states
        return hidden_states


class ChangesTheSum(nn.Module):
    def forward(self, hidden_states):
        residual = hidden_states
        hidden_states = residual + hidden_states
        hidden_states = hidden_states * 2
        residual = hidden_states
        hidden_states = residual + hidden_states
        return hidden_states


def test_branches_are_the_layers_own_code():
    attention_branch, mlp_branch = split_branches(Layer)
    x, layer = torch.randn(3), Layer()
    assert torch.equal(attention_branch(layer, x), x)
    assert torch.equal(attention_branch(layer, x, scale=4.0), 2 * x)
    assert torch.equal(mlp_branch(layer, x), x**2)
    first = x + attention_branch(layer, x)
    assert torch.equal(first + mlp_branch(layer, first), layer(x))


@pytest.mark.parametrize(
    "layer", [UsesAnArgumentTwice, CarriesOver, ScalesTheResidual, ReadsTheResidual, NormsTheResidual, ChangesTheSum]
)
def test_what_would_not_be_exact_is_refused(layer):
    with pytest.raises(UnsupportedCheckpointError, match=f"the forward of {layer.__name__} is not"):
        split_branches(layer)


class SkipsLayers(nn.Module):
    def forward(self, hidden_states):
        for layer in self.layers:
            if self.training:
                continue
            hidden_states = layer(hidden_states)
        return hidden_states


class AddsBetweenLayers(nn.Module):
    def forward(self, hidden_states, extra):
        for layer in self.layers:
            hidden_states = layer(hidden_states)
            hidden_states = hidden_states + extra
        return hidden_states


class KeepsTheStream(nn.Module):
    def forward(self, hidden_states):
        kept = []
        for layer in self.layers:
            hidden_states = layer(hidden_states, kept=kept + [hidden_states])
        return hidden_states


@pytest.mark.parametrize("model", [SkipsLayers, AddsBetweenLayers, KeepsTheStream])
def test_a_base_model_that_uses_the_stream_between_layers_is_refused(model):
    with pytest.raises(UnsupportedCheckpointError, match=f"the forward of {model.__name__} does more"):
        check_layer_loop(model)


def test_base_models_of_transformers_that_use_the_stream_between_layers_are_refused():
    from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextModel

    for model in (transformers.BioGptModel, Qwen3VLTextModel):
        with pytest.raises(UnsupportedCheckpointError, match="does more with the residual stream"):
            check_layer_loop(model)


def test_a_layer_without_source_is_refused():
    namespace = {"nn": nn}
    exec("class Layer(nn.Module):\n    def forward(self, hidden_states): ...", namespace)
    with pytest.raises(UnsupportedCheckpointError, match="the source of Layer can't be read"):
        split_branches(namespace["Layer"])


def test_a_subclass_of_a_familys_class_is_converted_but_not_saved(tmp_path):
    class MyLlama(transformers.LlamaForCausalLM):
        pass

    base = MyLlama(llama_config())
    model = convert_model(base)
    assert torch.equal(model(IDS).logits, base(IDS).logits)
    with pytest.raises(UnsupportedCheckpointError, match="Transformers' own classes are saved whole: llama"):
        model.save_pretrained(tmp_path)


def test_layers_of_several_classes_are_refused():
    model = tiny("glm")
    model.model.layers[0] = nn.Identity()
    with pytest.raises(UnsupportedCheckpointError, match="has no `layers` of one class"):
        convert_model(model)


def test_saving_is_refused_and_the_state_can_be_kept(tmp_path):
    base = tiny("glm")
    model = convert_model(base)
    with pytest.raises(UnsupportedCheckpointError, match="Save its state_dict"):
        model.save_pretrained(tmp_path)
    assert list(tmp_path.iterdir()) == []
    with torch.no_grad():
        model.model.layers[0].attn_hc.static_beta.add_(torch.arange(4))
    state = {name: value.clone() for name, value in model.state_dict().items()}
    again = convert_model(tiny("glm"))
    again.load_state_dict(state)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert not torch.equal(again(IDS).logits, base(IDS).logits)


@pytest.mark.slow
def test_training_and_compilation():
    torch.manual_seed(0)
    model = convert_model(tiny("glm4"), hc_mult=2).train()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        compiled(IDS, labels=IDS).loss.backward()
        optimizer.step()
    unmoved = [name for name, p in model.named_parameters() if "_hc." in name and not p.grad.any()]
    assert unmoved == []


def test_the_docs_name_every_family():
    assert {*COMMON, *LATENT_ATTENTION} < set(LONG_TAIL)
    assert set(FAMILIES) <= set(re.findall(r"`(\w+)`", section("With files of their own")))
