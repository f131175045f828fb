"""What an HC-Llama gives, and generates."""

import copy

import pytest
import torch
from transformers import AutoTokenizer, pipeline

from hf_hyperconn import HCLlamaForCausalLM, convert_model
from hf_hyperconn.models.connection import reduce_streams
from tests.marks import few
from tests.tolerances import COMPILED


def test_hidden_states_and_attentions(hc, ids):
    streams = []
    for layer in hc.model.layers[:-1]:
        layer.register_forward_hook(lambda module, args, output: streams.append(output))
    hc.set_attn_implementation("eager")
    with torch.no_grad():
        outputs = hc(ids, output_hidden_states=True, output_attentions=True)
        as_tuple = hc(ids, output_hidden_states=True, return_dict=False)
    assert len(outputs.hidden_states) == hc.config.num_hidden_layers + 1
    assert {state.shape for state in outputs.hidden_states} == {(2, 24, 32)}
    assert torch.equal(outputs.hidden_states[0], hc.model.embed_tokens(ids))
    for state, expected in zip(outputs.hidden_states[1:-1], streams, strict=False):
        assert expected.shape == (2, 24, 4, 32)
        assert torch.equal(state, reduce_streams(expected))
    assert [attention.shape for attention in outputs.attentions] == [(2, 4, 24, 24)] * 3
    assert torch.equal(as_tuple[0], outputs.logits)
    assert all(state.dim() == 3 for state in as_tuple[-1])


def test_readout_sum_differs_from_mean_only_in_scale(llama, ids):
    mean = convert_model(llama, hc_mult=4)
    summed = convert_model(llama, hc_mult=4, hc_readout="sum")
    with torch.no_grad():
        a, b = (m(ids, output_hidden_states=True).hidden_states[1] for m in (mean, summed))
    assert torch.equal(4 * a, b)


@pytest.mark.parametrize("attention", few(("sdpa", "eager", "flex_attention"), "sdpa", "eager"))
def test_attention_implementations(attention, llama, ids):
    if attention == "flex_attention":
        pytest.importorskip("torch.nn.attention.flex_attention")
    base = copy.deepcopy(llama)
    base.set_attn_implementation(attention)
    hc = convert_model(base, hc_mult=4)
    assert hc.config._attn_implementation == attention
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with torch.no_grad():
        expected = base(ids, attention_mask=mask).logits
        if attention == "flex_attention":
            usual = llama(ids, attention_mask=mask).logits
            if not torch.allclose(expected[mask == 1], usual[mask == 1], **COMPILED):
                pytest.skip("this CPU's flex attention is wrong with the base, too: PyTorch's AVX2 kernel is")
        assert torch.equal(hc(ids, attention_mask=mask).logits, expected)


@pytest.mark.parametrize("cache", [None, "dynamic", "static", "offloaded", "offloaded_static"])
@pytest.mark.parametrize("arguments", [{}, {"num_beams": 3}, {"do_sample": True, "top_k": 10}], ids=str)
def test_generate_as_the_base(cache, arguments, llama, ids):
    if cache is not None and "offloaded" in cache and not torch.cuda.is_available():
        pytest.skip("offloads from a GPU")
    hc = convert_model(llama, hc_mult=4)
    results = []
    for model in (llama, hc):
        torch.manual_seed(0)
        kwargs = {"use_cache": False} if cache is None else {"cache_implementation": cache}
        results.append(model.generate(ids, max_new_tokens=12, pad_token_id=0, **kwargs, **arguments))
    assert results[0].shape == (2, 36)
    assert torch.equal(*results)


def test_cache_gives_the_same_logits(hc, ids):
    with torch.no_grad():
        full = hc(ids).logits
        first = hc(ids[:, :10], use_cache=True)
        rest = hc(ids[:, 10:], past_key_values=first.past_key_values).logits
    torch.testing.assert_close(torch.cat([first.logits, rest], dim=1), full, **COMPILED)


def test_text_generation_pipeline(stories, tmp_path):
    HCLlamaForCausalLM.from_prenorm(stories).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(stories).save_pretrained(tmp_path)
    written = [
        pipeline("text-generation", model=str(folder))("Once upon a time", max_new_tokens=20, do_sample=False)
        for folder in (stories, tmp_path)
    ]
    assert written[0] == written[1]
