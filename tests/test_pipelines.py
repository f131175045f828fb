"""Models in stages that pass streams to each other, against the whole models."""

import copy
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from benchmarks import scale
from benchmarks.timing import with_tables
from hf_hyperconn import HCGPT2LMHeadModel, HCLlamaForCausalLM, HCLlamaModel, convert_model, pipeline_stages
from hf_hyperconn.conversion.demo import byte_tokenizer
from hf_hyperconn.errors import HyperConnError
from hf_hyperconn.models.sub_layers import is_of_connection

from .conftest import hc_llama, llama_config
from .families import FIELDS
from .marks import few
from .pages import snippets
from .recipe import run_on_ranks
from .tiny import tiny

KINDS = {
    "dhc": {},
    "mhc": {"connection": "mhc"},
    "frac": {"connection": "frac"},  # parts of one stream
    "attnres": {"connection": "attnres"},  # a value more for each sub-layer
    "skip": {"connection": "skip"},  # and the embedding
    "weighted": {"hc_readout": "weighted", "hc_start": "history"},
    "learned": {"hc_readout": "learned"},
}


def trained(model):
    """Return the model with every parameter of a connection or readout moved."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_of_connection(name):
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def untied(base):
    base = copy.deepcopy(base)
    base.config.tie_word_embeddings = False
    base.lm_head.weight = torch.nn.Parameter(base.lm_head.weight.detach().clone())
    return base


def llama(**fields) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = {"num_hidden_layers": 5, "initializer_range": 0.2, "tie_word_embeddings": False, **fields}
    return LlamaForCausalLM(llama_config(**config))


def assert_stages_are_the_model(model, ids: torch.Tensor, n: int) -> None:
    """Compare logits and gradients, with `torch.equal`; the gradients of stages are in the model's parameters."""
    mask = torch.ones_like(ids)
    mask[1, :3] = 0
    expected = model(ids, attention_mask=mask, use_cache=False).logits
    expected.square().mean().backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad()

    stages = pipeline_stages(model, n)
    names = [name for stage in stages for name, _ in stage.model.named_parameters()]
    assert sorted(names) == sorted(gradients)
    states = ids
    for stage in stages:
        states = stage(states, attention_mask=mask)
        assert stage.is_last or states.dim() == 4
    assert torch.equal(states, expected)
    states.square().mean().backward()
    for name, parameter in model.named_parameters():
        if gradients[name] is None:  # a router's correction, an expert that no token met
            assert parameter.grad is None
        else:
            assert torch.equal(parameter.grad, gradients[name]), name


@pytest.mark.parametrize("family", few([*FIELDS], "granite"))
def test_stages_are_the_whole_model(family, ids):
    assert_stages_are_the_model(trained(convert_model(untied(tiny(family)))).eval(), ids, 3)


@pytest.mark.parametrize("kind", few([*KINDS], "attnres"))
def test_stages_of_any_kind_are_the_whole_model(kind, ids):
    assert_stages_are_the_model(trained(convert_model(llama(), **KINDS[kind])), ids, 2)


def test_a_base_model_has_stages_and_keeps_its_own_layers(ids):
    model = convert_model(llama())
    first, last = pipeline_stages(model.model, 2)
    assert torch.equal(last(first(ids)), model.model(ids).last_hidden_state)
    assert all(hasattr(layer, "sub_layers") for layer in model.model.layers)


def test_what_has_no_stages_is_refused(ids):
    for model, n, said in (
        (llama(), 2, r"with hyper-connections, or its base model \(got LlamaForCausalLM\)"),
        (hc_llama(tie_word_embeddings=True), 2, r"tie_word_embeddings must be False \(got True\)"),
        (convert_model(llama()), 6, r"n must be between 1 and the number of layers, 5 \(got 6\)"),
        (convert_model(llama()), 0, r"\(got 0\)"),
    ):
        with pytest.raises(HyperConnError, match=said):
            pipeline_stages(model, n)
    routed = convert_model(untied(tiny("olmoe")))
    routed.config.output_router_logits = True
    with pytest.raises(HyperConnError, match="output_router_logits must be False"):
        pipeline_stages(routed, 2)
    with pytest.raises(ValueError, match="output_hidden_states must be False"):
        pipeline_stages(convert_model(llama()), 2)[0](ids, output_hidden_states=True)


def test_nothing_reads_the_hidden_states_of_a_later_stage_unnoticed(ids):
    first, last = pipeline_stages(convert_model(llama()), 2)
    seen = []
    last.model.model.register_forward_pre_hook(
        lambda model, args, kwargs: seen.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    assert last(first(ids)).isfinite().all()
    assert seen[0].shape == (2, 24, 32)
    assert seen[0].isnan().all()


@pytest.fixture(scope="module")
def conversions(tmp_path_factory) -> list[str]:
    """Conversions that generate: of each form of streams, with tied embeddings, in bfloat16, of other families."""
    models = {kind: convert_model(llama(), **fields) for kind, fields in KINDS.items()}
    models |= {family: convert_model(copy.deepcopy(tiny(family))) for family in ("llama", "granite", "olmoe", "qwen3")}
    models["bfloat16"] = convert_model(llama()).to(torch.bfloat16)
    folder = tmp_path_factory.mktemp("conversions")
    for name, model in models.items():
        trained(model).save_pretrained(folder / name)
    return [str(folder / name) for name in models]


@pytest.mark.slow
@pytest.mark.parametrize("stages", [2, 4])
def test_1f1b_has_the_losses_and_gradients_of_the_whole_model(stages, conversions):
    folders = [folder for folder in conversions if Path(folder).name in KINDS]
    printed = run_on_ranks(stages, "tests/ranks/training_stages.py", *folders)
    assert printed.count(f"losses and gradients of {stages} stages agree") == stages * len(KINDS)


@pytest.mark.slow
def test_stages_generate_what_the_whole_model_does(conversions):
    pytest.importorskip("transformers.distributed.pipeline_parallel")
    printed = run_on_ranks(3, "tests/ranks/generating_stages.py", *conversions)
    assert printed.count("3 stages generate alike") == 3 * len(conversions)


@pytest.mark.slow
def test_the_page_trains_and_generates(tmp_path):
    pytest.importorskip("transformers.distributed.pipeline_parallel")
    name, model = "Llama-3.1-8B-HCx4", convert_model(llama(vocab_size=256))
    model.save_pretrained(tmp_path / name)
    byte_tokenizer().save_pretrained(tmp_path / name)
    blocks = [code for language, code in snippets("docs/scale.md") if language == "python"]
    for block, word, said in zip(blocks, ("Schedule1F1B", "DistributedConfig"), ("step 1: ", "Once"), strict=True):
        assert word in block
        program = tmp_path / f"{word}.py"
        program.write_text(
            block.replace(f'"{name}"', repr(str(tmp_path / name))).replace('"trained"', f'"{tmp_path}/t"')
        )
        assert said in run_on_ranks(2, str(program))
    trained = HCLlamaForCausalLM.from_pretrained(tmp_path / "t").state_dict()
    moved = [not torch.equal(value, trained[key]) for key, value in model.state_dict().items()]
    assert len(moved) == len(trained)
    assert sum(moved) > 0.9 * len(moved)


@pytest.mark.slow
def test_the_page_has_the_estimates():
    page = scale.PAGE.read_text(encoding="utf-8")
    assert "<!-- streams -->" in page
    assert with_tables(page, scale.tables()) == page
    assert len(page.splitlines()) <= 170


def test_generating_in_stages_is_refused_where_transformers_splits_otherwise():
    distributed = pytest.importorskip("transformers.distributed").DistributedConfig(pp_size=2)
    said = r"pp_size must be 1 for HCLlamaModel \(got 2\).*Use fsdp_size or tp_size"
    for config in ({"pp_size": 2}, distributed):
        with pytest.raises(ValueError, match=said):
            HCLlamaModel.prepare_distribute_model(config)
    with pytest.raises(ValueError, match=r"of a family with base_model_pp_plan \(got gpt2"):
        HCGPT2LMHeadModel.prepare_distribute_model(distributed)
