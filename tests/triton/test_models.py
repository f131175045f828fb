"""Whole models on a GPU, with the native kernels where a connection has them: conversions, generation, training."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from hf_hyperconn import convert_model, set_hc_implementation
from tests.conftest import llama_config
from tests.families import FAMILIES
from tests.tiny import tiny
from tests.tolerances import AUTOCAST_BFLOAT16, COMPILED
from tests.triton.common import DEVICE, ON_GPU, seed

pytestmark = ON_GPU

HISTORY = {"hc_start": "history"}
# those whose conversions equal their base
KINDS = {
    "SHC×3": {"connection": "shc", "hc_mult": 3},
    "DHC×8": {"hc_mult": 8},
    "DHC×4 history by type": HISTORY,
    "DHC×3 history by depth": {**HISTORY, "hc_mult": 3, "hc_history": "depth"},
    "SHC×4 history": {**HISTORY, "connection": "shc"},
    "attention residuals": {"connection": "attnres"},
    "attention residuals, blocks of 2": {"connection": "attnres", "hc_block": 2},
    "skips": {"connection": "skip"},
    "DHC×10, without kernels": {"hc_mult": 10},
}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@pytest.fixture(autouse=True)
def as_users_have_it() -> None:
    """Kernels by themselves, and operations that PyTorch has no deterministic form of."""
    torch.use_deterministic_algorithms(False)
    set_hc_implementation("auto")


@pytest.fixture
def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    model = LlamaForCausalLM(llama_config(initializer_range=0.2)).to(DEVICE).eval()
    model.generation_config.eos_token_id = None
    return model


@pytest.fixture
def ids() -> torch.Tensor:
    """Token ids `[2, 24]`."""
    return torch.randint(3, 96, (2, 24), generator=seed(0)).to(DEVICE)


def equal_logits(base, converted, ids) -> bool:
    """Also for a padded batch."""
    mask = torch.ones_like(ids)
    mask[0, :7] = 0
    with torch.no_grad():
        pairs = [(model(ids).logits, model(ids, attention_mask=mask).logits) for model in (base, converted)]
    assert not pairs[0][0].isnan().any()
    return all(torch.equal(mine, other) for mine, other in zip(*pairs, strict=True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("model_type", FAMILIES)
def test_conversions_equal_their_base(model_type, dtype, ids):
    base = copy.deepcopy(tiny(model_type)).to(DEVICE, dtype)
    assert equal_logits(base, convert_model(base, hc_mult=4), ids)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_exact_kind_equals_its_base(kind, dtype, llama, ids):
    base = llama.to(dtype)
    assert equal_logits(base, convert_model(base, **KINDS[kind]), ids)


@pytest.mark.parametrize("cache", ["dynamic", "offloaded"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_generates_as_its_base(cache, dtype, llama, ids):
    assert torch.equal(*continuations(llama.to(dtype), ids, cache))


@pytest.mark.parametrize("cache", ["static", "offloaded_static"])
def test_generates_as_its_base_compiled(cache, llama, ids):
    """With a static cache, Transformers compiles decoding to CUDA graphs; of 16 bits Inductor skips some roundings."""
    assert torch.equal(*continuations(llama, ids, cache))


def continuations(base, ids, cache: str) -> list[torch.Tensor]:
    settings = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "cache_implementation": cache}
    written = [model.generate(ids, **settings) for model in (base, convert_model(base, hc_mult=4))]
    assert written[0].shape == (2, 36)
    return written


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("connection", ["dhc", "mhc"])
def test_compiled_training_is_eager_training(connection, mode, llama, ids):
    """Loss and gradient of every parameter; "reduce-overhead" is CUDA graphs."""
    eager = randomise(convert_model(llama, hc_mult=4, connection=connection)).train()
    compiled = copy.deepcopy(eager)
    torch.compiler.reset()
    found = []
    for model, run in ((eager, eager), (compiled, torch.compile(compiled, mode=mode))):
        for _ in range(3):
            model.zero_grad()
            loss = run(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
        found.append({"loss": loss.detach().clone(), **{name: p.grad.clone() for name, p in model.named_parameters()}})
    expected, found = found
    for name, value in found.items():
        size = expected[name].abs().max().item()
        torch.testing.assert_close(value / size, expected[name] / size, msg=name, **COMPILED)


def test_compiled_training_under_autocast(llama, ids):
    model = randomise(convert_model(llama, hc_mult=4)).train()
    torch.compiler.reset()
    losses = []
    for run in (model, torch.compile(model)):
        with torch.autocast(DEVICE, torch.bfloat16):
            losses.append(run(input_ids=ids, labels=ids, use_cache=False).loss)
        losses[-1].backward()
    torch.testing.assert_close(*losses, **AUTOCAST_BFLOAT16)
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())


def randomise(model):
    """The model, its connections no longer equivalent to residual connections."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_hc." in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=seed(1)).to(parameter))
    return model


def test_training_steps_repeat_bit_for_bit(llama, ids):
    """Without atomics, two trainings from one start have equal parameters."""
    models = [randomise(convert_model(copy.deepcopy(llama), hc_mult=4)).train() for _ in range(2)]
    for model in models:
        model.set_attn_implementation("eager")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            model(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    mine, other = (dict(model.named_parameters()) for model in models)
    connections = [name for name in mine if "_hc." in name]
    assert connections
    assert all(torch.equal(mine[name], other[name]) for name in connections)


def test_weights_on_the_gpu_are_used_where_they_are(llama, ids):
    """A module that is moved keeps no coefficient behind."""
    model = convert_model(llama, hc_mult=4)
    there = model(ids).logits
    back = model.cpu()(ids.cpu()).logits
    again = model.to(DEVICE)(ids).logits
    assert back.device.type == "cpu"
    assert torch.equal(there, again)


def test_memory_kept_is_that_of_the_streams_and_branches(ids):
    """Of each layer the streams that it receives and what its two branches return: mixed streams are never stored."""
    layers, size, tokens = 8, 256, torch.randint(3, 96, (1, 128), generator=seed(0)).to(DEVICE)
    torch.manual_seed(0)
    base = LlamaForCausalLM(llama_config(hidden_size=size, num_hidden_layers=layers, intermediate_size=size)).to(
        DEVICE
    )
    kept = {}
    for name, model in (("plain", base), ("DHC×4", convert_model(base, hc_mult=4))):
        model.train()(tokens, labels=tokens, use_cache=False).loss.backward()
        before = torch.cuda.memory_allocated()
        loss = model(tokens, labels=tokens, use_cache=False).loss
        kept[name] = torch.cuda.memory_allocated() - before
        del loss
    row = 4 * size * tokens.numel()
    coefficients = 4 * 2 * 60 * tokens.numel()  # of two sub-layers: 24, as many predictions, four deviations
    assert kept["DHC×4"] - kept["plain"] < layers * (6 * row + 1.1 * coefficients)


def test_a_cuda_graph_of_a_whole_model(llama, ids):
    """Captured by hand, as serving engines do; replayed on other tokens."""
    model = convert_model(llama, hc_mult=4)
    model.set_attn_implementation("eager")  # another has another kernel in a graph
    others = ids.flip(-1).contiguous()
    place = ids.clone()
    with torch.no_grad():
        expected = model(others, use_cache=False).logits
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(place, use_cache=False)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = model(place, use_cache=False).logits
        place.copy_(others)
        graph.replay()
    assert torch.equal(logits, expected)
