"""Skips from the embedding: their equation, finite differences, and in models."""

from copy import deepcopy

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM, convert_model, hc_param_groups, hc_parameters
from hf_hyperconn.models.embedding_skip import EmbeddingSkip

from .conftest import hc_llama, record_branches
from .sub_layer import check_gradients, randomized, written
from .tolerances import ANOTHER_ORDER, LOOP_FLOAT64

D = 6
SKIP = {"connection": "skip", "hc_mult": 2}


def test_a_sub_layer_is_its_equation_token_by_token():
    module = randomized(EmbeddingSkip(D, 3)).double()
    x = torch.randn(2, 3, D, dtype=torch.float64)
    streams = module.expand_streams(x)
    found = written(module, streams, branch=torch.sin).detach()
    for b, s in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
        r = x[b, s]
        e = r / (r.square().mean() + module.eps).sqrt()
        h = module.factors[0].item() * r + module.factors[1].item() * e
        torch.testing.assert_close(streams[b, s], torch.stack([r, e]), **LOOP_FLOAT64)
        torch.testing.assert_close(found[b, s], torch.stack([h + torch.sin(h), e]), **LOOP_FLOAT64)


def test_by_finite_differences():
    module = randomized(EmbeddingSkip(4, 1)).double()
    check_gradients(module, torch.randn(1, 2, 2, 4, dtype=torch.float64))
    x = torch.randn(1, 2, 4, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: written(module, module.expand_streams(x)), x)


@torch.no_grad()
def test_a_model_is_modded_nanogpt_s_equation(ids):
    """x = λ0 x + λ1 x0 before each layer, with x0 = norm(embedding)."""
    model = randomized(hc_llama(**SKIP), 0.3).eval()
    seen = record_branches(model)
    states = model(ids, output_hidden_states=True).hidden_states
    x = model.model.embed_tokens(ids)
    x0 = torch.nn.functional.rms_norm(x, (x.shape[-1],), eps=model.config.hc_eps)
    assert len(seen) == 2 * model.config.num_hidden_layers
    for k, (branch_input, output) in enumerate(seen):
        if k % 2 == 0:
            torch.testing.assert_close(states[k // 2], x, **ANOTHER_ORDER)
            lambdas = model.model.layers[k // 2].attn_hc.factors
            x = lambdas[0] * x + lambdas[1] * x0
        torch.testing.assert_close(branch_input, x, **ANOTHER_ORDER)
        x = x + output
    torch.testing.assert_close(states[-1], model.model.norm(x), **ANOTHER_ORDER)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_starts_as_its_base(dtype, stories):
    ids = torch.randint(3, 512, (2, 48), generator=torch.Generator().manual_seed(0))
    base = LlamaForCausalLM.from_pretrained(stories, dtype=dtype).eval()
    config = HCLlamaConfig.from_prenorm(base.config, connection="skip")
    model = HCLlamaForCausalLM.from_pretrained(stories, config=config, dtype=dtype).eval()
    assert torch.equal(model(ids).logits, base(ids).logits)
    settings = {"max_new_tokens": 20, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **settings), base.generate(ids, **settings))


@torch.no_grad()
def test_a_token_of_zeros_starts_as_in_the_base(llama, ids):
    base = deepcopy(llama)
    base.model.embed_tokens.weight[ids[0, 0]] = 0
    expected = base(ids).logits
    assert torch.equal(convert_model(base, connection="skip")(ids).logits, expected)


def test_every_layer_learns_from_the_first_step_on_without_decay(ids, llama):
    model = convert_model(deepcopy(llama), connection="skip")
    model(ids, labels=ids).loss.backward()
    factors = hc_parameters(model)
    assert len(factors) == model.config.num_hidden_layers
    assert all(each.grad.all() for each in factors.values())
    decayed = {id(p) for group in hc_param_groups(model, 1, 0.1) if group["weight_decay"] for p in group["params"]}
    assert not decayed & {id(each) for each in factors.values()}


def test_gradients_are_float32_sums_in_bfloat16(ids):
    """Each sums over all tokens; in bfloat16 small terms would be lost."""
    model = randomized(hc_llama(**SKIP), 0.3).to(torch.bfloat16)
    model(ids, labels=ids).loss.backward()
    assert {each.grad.dtype for each in hc_parameters(model).values()} == {torch.float32}
