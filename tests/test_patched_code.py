"""The source that is read is the code that runs; what patches have put in its place is refused."""

import functools

import pytest
import torch
from torch import nn
from transformers import BloomConfig, BloomForCausalLM, LlamaForCausalLM, LlamaModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.bloom.modeling_bloom import BloomMLP
from transformers.models.llama import modeling_llama
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaMLP

import hf_hyperconn
from hf_hyperconn import convert_model
from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.in_memory.running_code import running_code

from .conftest import llama_config

IDS = torch.randint(3, 96, (2, 9), generator=torch.Generator().manual_seed(0))
SCALE = 1.0


def with_layers(layer_class: type[nn.Module], model_class: type[LlamaModel] = LlamaModel) -> LlamaForCausalLM:
    """A Llama of a class of one's own, with layers of a class of one's own."""

    class Model(model_class):
        def __init__(self, config):
            super().__init__(config)
            self.layers = nn.ModuleList([layer_class(config, i) for i in range(config.num_hidden_layers)])

    class ForCausalLM(LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model = Model(config)

    torch.manual_seed(0)
    return ForCausalLM(llama_config(initializer_range=0.2)).eval()


@torch.no_grad()
def equal(base, **fields) -> bool:
    model = convert_model(base, **fields or {"connection": "shc", "hc_mult": 2})
    return torch.equal(model(IDS, use_cache=False).logits, base(IDS, use_cache=False).logits)


def halving(forward):
    @functools.wraps(forward)
    def wrapper(self, hidden_states, *args, **kwargs):
        return forward(self, hidden_states * 0.5, *args, **kwargs)

    return wrapper


def layer(scale: float = 0.5, decorate=lambda forward: forward) -> type[nn.Module]:
    """A layer whose forward has its scale as a default, which the module's `SCALE` does not replace."""
    SCALE = scale  # noqa: N806

    class Layer(LlamaDecoderLayer):
        @decorate
        def forward(self, hidden_states, position_embeddings=None, scale=SCALE, **kwargs):
            residual = hidden_states
            hidden_states = self.input_layernorm(hidden_states)
            hidden_states, _ = self.self_attn(hidden_states, position_embeddings=position_embeddings, **kwargs)
            hidden_states = residual + hidden_states * scale
            residual = hidden_states
            hidden_states = self.post_attention_layernorm(hidden_states)
            hidden_states = residual + self.mlp(hidden_states)
            return hidden_states

    return Layer


class Private(LlamaDecoderLayer):
    """Its scale has a private name."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.__scale = 0.7

    def forward(self, hidden_states, **kwargs):
        hidden_states = hidden_states + self.mlp(self.input_layernorm(hidden_states)) * self.__scale
        return hidden_states


class Scaled(LlamaDecoderLayer):
    """It scales its sum, otherwise at every place of the sequence."""

    def __init__(self, config, layer_idx):
        super().__init__(config, layer_idx)
        self.sum_scale = nn.Parameter(torch.linspace(0.5, 1, 9).unsqueeze(-1))

    def forward(self, hidden_states, **kwargs):
        hidden_states = hidden_states + self.mlp(self.input_layernorm(hidden_states))
        hidden_states = hidden_states * self.sum_scale
        hidden_states = torch.clamp(hidden_states, min=-0.5, max=0.5)
        return hidden_states


class ReadsAGlobal(LlamaDecoderLayer):
    def forward(self, hidden_states, **kwargs):
        hidden_states = hidden_states + self.mlp(self.input_layernorm(hidden_states)) * SCALE
        return hidden_states


@pytest.mark.parametrize("layer_class", [layer(), Private, Scaled])
@pytest.mark.parametrize("start", ["copies", "history"])
def test_a_layers_code_is_read_as_it_runs(layer_class, start):
    assert equal(with_layers(layer_class), connection="shc", hc_mult=3, hc_start=start)


def test_a_global_that_changes_later_changes_a_conversion(monkeypatch):
    base = with_layers(ReadsAGlobal)
    model = convert_model(base, connection="shc")
    before = model(IDS).logits
    monkeypatch.setitem(globals(), "SCALE", 0.5)
    assert torch.equal(model(IDS).logits, base(IDS).logits)
    assert not torch.equal(model(IDS).logits, before)


def in_a_closure() -> type[nn.Module]:
    gain = 0.5

    class Layer(LlamaDecoderLayer):
        def forward(self, hidden_states, **kwargs):
            hidden_states = hidden_states + self.mlp(self.input_layernorm(hidden_states)) * gain
            return hidden_states

    return Layer


def not_as_in_its_file() -> type[nn.Module]:
    class Layer(Private):
        forward = ReadsAGlobal.forward

    function = running_code(Layer).function
    Layer.forward = type(function)(function.__code__.replace(co_consts=(None, "changed")), function.__globals__)
    return Layer


OTHER_CODE = {
    "a decorator": (lambda: layer(decorate=halving), "it is wrapped by a function of tests"),
    "autocast": (
        lambda: layer(decorate=torch.autocast("cpu", torch.bfloat16)),
        "it is wrapped by a function of torch",
    ),
    "a closure": (in_a_closure, "it reads gain of the function that it was made in"),
    "other code": (not_as_in_its_file, "its file has no function of this code"),
}


@pytest.mark.parametrize(("make", "reason"), OTHER_CODE.values(), ids=OTHER_CODE)
def test_a_layer_whose_source_is_not_what_runs_is_refused(make, reason):
    with pytest.raises(UnsupportedCheckpointError, match=f"Layer.forward is not the code .*: {reason}"):
        convert_model(with_layers(make()))


def fast_layer(self, hidden_states, **kwargs):
    hidden_states = (
        hidden_states + 0.5 * self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]
    )
    return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states))


def halves_its_output(self, *args, **kwargs):
    outputs = MODEL_FORWARD(self, *args, **kwargs)
    outputs.last_hidden_state = outputs.last_hidden_state * 0.5
    return outputs


MODEL_FORWARD = LlamaModel.forward


@pytest.mark.parametrize(
    ("patched", "patch", "reason"),
    [
        (LlamaDecoderLayer, fast_layer, "fast_layer runs in its place"),
        (LlamaDecoderLayer, halving(LlamaDecoderLayer.forward), "it is wrapped by a function of tests"),
        (LlamaModel, halves_its_output, "halves_its_output runs in its place"),
        (LlamaModel, halving(MODEL_FORWARD), "it is wrapped by a function of tests"),
    ],
)
def test_a_class_that_was_patched_is_refused(patched, patch, reason, llama, monkeypatch):
    hf_hyperconn.HCLlamaForCausalLM  # noqa: B018  # made before
    monkeypatch.setattr(patched, "forward", patch)
    with pytest.raises(UnsupportedCheckpointError, match=f"{patched.__name__}.forward is not the code .*: {reason}"):
        convert_model(llama)


def test_a_patched_module_that_branches_do_not_call_is_refused(monkeypatch):
    base = BloomForCausalLM(BloomConfig(vocab_size=50, hidden_size=16, n_layer=2, n_head=2))
    monkeypatch.setattr(BloomMLP, "forward", lambda self, hidden_states, residual: residual)
    with pytest.raises(UnsupportedCheckpointError, match="BloomMLP.forward is not the code .*: its file"):
        convert_model(base)


def test_a_patched_module_that_branches_call_is_taken(llama, monkeypatch):
    usual = LlamaMLP.forward
    monkeypatch.setattr(LlamaMLP, "forward", lambda self, x: 2 * usual(self, x))
    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", lambda q, k, cos, sin: (q, k))
    assert equal(llama)


def test_a_generic_class_is_read_again_when_it_was_patched(monkeypatch):
    base = with_layers(ReadsAGlobal)
    assert equal(base)
    monkeypatch.setattr(ReadsAGlobal, "forward", layer(0.25).forward)
    assert equal(base)


class InTwoLoops(LlamaModel):
    def forward(self, input_ids=None, **kwargs):
        hidden_states = self.embed_tokens(input_ids)
        position_embeddings = self.rotary_emb(hidden_states, torch.arange(hidden_states.shape[1])[None])
        for layer in self.layers[:2]:
            hidden_states = layer(hidden_states, position_embeddings=position_embeddings)
        hidden_states = hidden_states - hidden_states.mean(-2, keepdim=True)
        for layer in self.layers[2:]:
            hidden_states = layer(hidden_states, position_embeddings=position_embeddings)
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden_states))


def test_a_model_that_uses_the_stream_between_two_loops_is_refused():
    with pytest.raises(UnsupportedCheckpointError, match="the forward of Model does more with the residual stream"):
        convert_model(with_layers(LlamaDecoderLayer, InTwoLoops))
