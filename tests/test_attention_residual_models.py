"""Attention residuals in whole models: equal to their base, and what Transformers and torch do with a model."""

import pytest
import torch
from torch._inductor import config as inductor
from transformers import LlamaConfig, LlamaForCausalLM

from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM
from hf_hyperconn.models.attention_residuals import AttentionReadout, AttentionResidual

from .conftest import hc_llama, kept_for_a_token, llama_config
from .marks import few, tail
from .tolerances import ANOTHER_ORDER, COMPILED

ATTNRES = {"connection": "attnres", "hc_mult": 1}
BLOCKS = (1, 2, 4)
blocks = pytest.mark.parametrize("block", BLOCKS)
dtypes = pytest.mark.parametrize("dtype", few((torch.float32, torch.bfloat16, torch.float16), torch.bfloat16))
SETTINGS = {"do_sample": False, "pad_token_id": 0}


def converted(folder, block: int, dtype=torch.float32, **size) -> HCLlamaForCausalLM:
    config = HCLlamaConfig.from_prenorm(LlamaConfig.from_pretrained(folder, **size), **ATTNRES, hc_block=block)
    return HCLlamaForCausalLM.from_pretrained(folder, config=config, dtype=dtype).eval()


def trained(block: int, form: str = "sum", **fields) -> HCLlamaForCausalLM:
    """A tiny random model whose queries are random as well."""
    model = hc_llama(**ATTNRES, hc_block=block, hc_attention=form, **fields).eval()
    with torch.no_grad():
        for query in queries(model).values():
            query.copy_(torch.randn_like(query))
    return model


def queries(model) -> dict[str, torch.Tensor]:
    return {name: parameter for name, parameter in model.named_parameters() if name.endswith(".query")}


@pytest.fixture
def story_ids() -> torch.Tensor:
    return torch.randint(3, 512, (2, 48), generator=torch.Generator().manual_seed(0))


@blocks
@dtypes
@torch.no_grad()
def test_equal_to_the_base(block, dtype, stories, story_ids):
    base, model = LlamaForCausalLM.from_pretrained(stories, dtype=dtype).eval(), converted(stories, block, dtype)
    expected, found = (model(story_ids, output_hidden_states=True) for model in (base, model))
    assert torch.equal(found.logits, expected.logits)
    assert len(found.hidden_states) == len(expected.hidden_states)
    assert all(map(torch.equal, found.hidden_states, expected.hidden_states))
    for use_cache in (True, False):  # in bfloat16 a base may itself go on otherwise without its cache
        settings = {**SETTINGS, "max_new_tokens": 40, "use_cache": use_cache}
        assert torch.equal(model.generate(story_ids, **settings), base.generate(story_ids, **settings))


@blocks
def test_gradients_are_those_of_the_base_and_queries_have_their_own(block, stories, story_ids):
    base, model = LlamaForCausalLM.from_pretrained(stories), converted(stories, block)
    for run in (base, model):
        run(story_ids, labels=story_ids).loss.backward()
    found = dict(model.named_parameters())
    for name, parameter in base.named_parameters():
        torch.testing.assert_close(found[name].grad, parameter.grad, **ANOTHER_ORDER)
    without = {name for name, query in queries(model).items() if not query.grad.any()}
    assert without == {"model.layers.0.attn_hc.query"}


@pytest.mark.slow
@pytest.mark.parametrize("block", [*tail(1), 2])
@pytest.mark.parametrize(
    ("dtype", "emulate"),
    [(torch.float32, False), (torch.bfloat16, True)],
)
@torch.no_grad()
def test_equal_to_the_compiled_base_when_compiled(block, dtype, emulate, stories, story_ids):
    logits, size = [], {"num_hidden_layers": 3}
    base = LlamaForCausalLM.from_pretrained(stories, dtype=dtype, **size)
    for model in (base, converted(stories, block, dtype, **size)):
        torch._dynamo.reset()
        with inductor.patch(emulate_precision_casts=emulate):
            logits.append(torch.compile(model.eval(), fullgraph=True)(story_ids).logits)
    assert torch.equal(*logits)


@pytest.mark.slow
@pytest.mark.parametrize(("trains", "records"), [(True, True), (True, False), (False, True)])
def test_no_graph_breaks(trains, records, ids):
    """With gradients, without, and where nothing requires one."""
    model = trained(2, num_hidden_layers=2).requires_grad_(trains)
    torch._dynamo.reset()
    with torch.set_grad_enabled(records):
        found = torch.compile(model, fullgraph=True, backend="eager")(ids).logits
        assert torch.equal(found, model(ids).logits)


@pytest.mark.slow
@pytest.mark.tail
@pytest.mark.parametrize("form", ["sum", "mean"])
def test_compiled_training(form, ids):
    """Layers by themselves: those after the second differ only in the number of values."""
    model, gradients = trained(2, form), []
    for compiles in (False, True):
        if compiles:
            torch._dynamo.reset()
            for layer in model.model.layers:
                layer.compile(fullgraph=True)
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    torch.testing.assert_close(*gradients, **COMPILED)


@blocks
def test_checkpointed_gradients(block, ids):
    model, gradients = trained(block).train(), []
    for enable in (False, True):
        if enable:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


@blocks
@pytest.mark.parametrize("form", ["sum", "mean"])
@torch.no_grad()
def test_generates_with_a_cache(block, form, ids):
    model = trained(block, form)
    continuations = [
        model.generate(ids, **SETTINGS, max_new_tokens=12, eos_token_id=None, use_cache=use) for use in (True, False)
    ]
    assert torch.equal(*continuations)


@blocks
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_autograd_keeps(block, dtype):
    """The streams that each layer takes and the readout, once, in their dtype; and what attention has written."""
    plain = LlamaForCausalLM(llama_config(num_hidden_layers=6)).to(dtype)
    model = trained(block, num_hidden_layers=6).to(dtype)
    rows = 1 + sum(2 + -(-2 * layer // block) for layer in range(1, 7)) + 6
    added = kept_for_a_token(model) - kept_for_a_token(plain)
    assert added == rows * model.config.hidden_size * dtype.itemsize


@torch.no_grad()
def test_under_autocast_equal_to_the_base(stories, story_ids):
    logits = []
    for model in (LlamaForCausalLM.from_pretrained(stories), converted(stories, 2)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits.append(model(story_ids).logits)
    assert torch.equal(*logits)


def test_queries_are_saved_and_stay_in_float32(tmp_path, ids):
    model = trained(2)
    model.save_pretrained(tmp_path)
    loaded = HCLlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {query.dtype for query in queries(loaded).values()} == {torch.float32}
    for name, query in queries(model).items():
        assert torch.equal(queries(loaded)[name], query)


def test_every_sub_layer_and_the_readout_have_a_query():
    model = hc_llama(**ATTNRES, hc_block=2)
    modules = [module for module in model.modules() if isinstance(module, (AttentionResidual, AttentionReadout))]
    assert len(modules) == len(queries(model)) == 2 * model.config.num_hidden_layers + 1
    assert all(not query.any() for query in queries(model).values())
