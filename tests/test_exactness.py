"""The promise of the converter, on a real pretrained Llama: equal to its base, bit for bit."""

from itertools import product
from pathlib import Path

import pytest
import torch
from torch._inductor import config as inductor
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from hf_hyperconn.conversion.convert import convert_checkpoint

from .conftest import asked_for
from .marks import few, tail
from .processes import elsewhere

CONNECTIONS, WIDTHS = ("shc", "dhc"), (1, 2, 4, 8)
NEW_TOKENS = {"sdpa": 12, "eager": 100}  # by attention
PROMPTS = ["Once upon a time, there was a", "The big dog", "One day, Lily went to the park with her mom and"]
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def converted(request, stories, tmp_path_factory) -> dict[tuple[str, int], Path]:
    place, asked = tmp_path_factory.mktemp("converted"), asked_for(request, "n")
    return {
        (connection, n): convert_checkpoint(
            str(stories), place / f"{connection}{n}", connection=connection, hc_mult=n, verify="structure"
        ).path
        for connection in CONNECTIONS
        for n in WIDTHS
        if n in asked
    }


@pytest.fixture(scope="module")
def differing(request, stories, converted, tmp_path_factory) -> dict[str, list[str]]:
    """What processes without this package find to differ, one for each attention."""
    jobs = []
    for attention, new_tokens in NEW_TOKENS.items():
        widths = [n for n in WIDTHS if (attention, n) in asked_for(request, "attention", "n")]
        comparison = {
            "base": str(stories),
            "converted": [str(path) for (_, n), path in converted.items() if n in widths],
            "attention": attention,
            "dtypes": DTYPES,
            "prompts": AutoTokenizer.from_pretrained(stories)(PROMPTS)["input_ids"],
        }
        if widths:
            jobs.append({"comparisons": [comparison], "new_tokens": new_tokens})
    return elsewhere(jobs, tmp_path_factory.mktemp("elsewhere"))


@pytest.mark.parametrize(
    ("attention", "n"),
    few(product(NEW_TOKENS, WIDTHS), ("sdpa", 2), ("sdpa", 4), tail=[("eager", 1), ("eager", 2), ("eager", 8)]),
)
@pytest.mark.parametrize("connection", CONNECTIONS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_equal_to_the_base_without_the_package(connection, n, dtype, attention, converted, differing):
    assert differing[f"{converted[connection, n]} {dtype} {attention}"] == []


@pytest.mark.slow
@pytest.mark.parametrize("n", [*tail(2), 4])
@pytest.mark.parametrize(
    ("dtype", "emulate"),
    [(torch.float32, False), (torch.bfloat16, True)],
)
def test_equal_to_the_compiled_base_when_compiled(n, dtype, emulate, stories, converted):
    """Two layers; in bfloat16, when Inductor is told to keep the roundings of eager mode."""
    ids = torch.randint(3, 512, (2, 48), generator=torch.Generator().manual_seed(0))
    logits = []
    for folder, auto in ((stories, LlamaForCausalLM), (converted["dhc", n], AutoModelForCausalLM)):
        torch._dynamo.reset()
        model = auto.from_pretrained(folder, dtype=dtype, num_hidden_layers=2).eval()
        with torch.no_grad(), inductor.patch(emulate_precision_casts=emulate):
            logits.append(torch.compile(model, fullgraph=True)(ids).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("n", [3, 5, 6])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_equal_for_widths_that_are_no_power_of_two(n, dtype, stories, tmp_path):
    folder = convert_checkpoint(str(stories), tmp_path / "out", hc_mult=n, verify="off").path
    ids = torch.randint(3, 512, (2, 48), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = LlamaForCausalLM.from_pretrained(stories, dtype=dtype)(ids).logits
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)(ids).logits, expected)
