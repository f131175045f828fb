"""Connections other than DHC and SHC in whole models: conversion, training, saving and compiling."""

import json

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoModelForCausalLM, LlamaForCausalLM

from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM, convert_model
from hf_hyperconn.conversion import cli
from hf_hyperconn.conversion.verify import verify_checkpoint

from .conftest import asked_for, hc_llama
from .marks import few
from .processes import elsewhere
from .sub_layer import randomized
from .test_training import batches, train  # noqa: F401
from .tolerances import COMPILED, READS_SUM_TO_ONE

CONNECTIONS = ("mhc", "ihc", "frac")
WIDTHS = (2, 4)
connections = pytest.mark.parametrize("connection", CONNECTIONS)
CASES = [(connection, n) for connection in CONNECTIONS for n in WIDTHS]
USUAL = [(connection, 4) for connection in CONNECTIONS]


@pytest.fixture(scope="module")
def converted(request, stories, tmp_path_factory):
    """Folders made by the command line, by connection and number of streams."""
    place, folders, asked = tmp_path_factory.mktemp("converted"), {}, asked_for(request, "n")
    for connection, n in [case for case in CASES if case[1] in asked]:
        folders[connection, n] = place / f"{connection}{n}"
        arguments = [str(stories), str(folders[connection, n]), "--connection", connection, "-n", str(n), "-q"]
        assert cli.main(["convert", *arguments]) == 0
    return folders


@pytest.fixture(scope="module")
def differing(stories, converted, tmp_path_factory):
    generator = torch.Generator().manual_seed(0)
    case = {"base": str(stories), "attention": "sdpa"}
    case["prompts"] = [torch.randint(3, 512, (size,), generator=generator).tolist() for size in (24, 5, 17)]
    low = {**case, "dtypes": ["bfloat16", "float16"], "converted": [str(folder) for folder in converted.values()]}
    fracs = [str(folder) for (connection, _), folder in converted.items() if connection == "frac"]
    single = {**case, "dtypes": ["float32"], "converted": fracs}
    return elsewhere([{"comparisons": [low, single], "new_tokens": 6}], tmp_path_factory.mktemp("elsewhere"))


@pytest.mark.parametrize(("connection", "n"), few(CASES, *USUAL))
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_equal_to_the_base_in_16_bits_without_the_package(connection, n, dtype, converted, differing):
    assert differing[f"{converted[connection, n]} {dtype} sdpa"] == []


@pytest.mark.parametrize("n", few(WIDTHS, 4))
def test_frac_equals_the_base_in_float32_without_the_package(n, converted, differing):
    assert differing[f"{converted['frac', n]} float32 sdpa"] == []


@pytest.mark.parametrize("n", few(WIDTHS, 4))
@pytest.mark.parametrize("connection", [connection for connection in CONNECTIONS if connection != "frac"])
@torch.no_grad()
def test_equal_to_the_base_in_float32_but_for_the_sum_of_reads(connection, n, stories, converted):
    base, model = (
        LlamaForCausalLM.from_pretrained(stories),
        AutoModelForCausalLM.from_pretrained(converted[connection, n]),
    )
    ids = torch.randint(3, 512, (2, 48), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(model(ids).logits, base(ids).logits, **READS_SUM_TO_ONE)
    settings = {"max_new_tokens": 100, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.generate(ids, **settings), base.generate(ids, **settings))


@pytest.mark.parametrize(("connection", "n"), few(CASES, *USUAL))
def test_converted_equals_from_prenorm_and_is_stable_when_saved(connection, n, stories, converted, tmp_path):
    expected = HCLlamaForCausalLM.from_prenorm(stories, connection=connection, hc_mult=n).state_dict()
    model, info = HCLlamaForCausalLM.from_pretrained(converted[connection, n], output_loading_info=True)
    assert not any(info.values())
    found = model.state_dict()
    assert found.keys() == expected.keys()
    assert [name for name, value in expected.items() if not torch.equal(found[name], value)] == []
    model.save_pretrained(tmp_path)
    assert verify_checkpoint(tmp_path, str(stories)).passed
    before, after = (
        json.loads((folder / "config.json").read_text()) for folder in (converted[connection, n], tmp_path)
    )
    assert {**after, "transformers_version": before["transformers_version"]} == before


@pytest.mark.parametrize("n", few(WIDTHS, 4))
@pytest.mark.parametrize("connection", few(("mhc", "ihc"), "mhc", tail=["ihc"]))
@pytest.mark.parametrize("make", [lambda p: torch.optim.SGD(p, lr=0.1), lambda p: torch.optim.AdamW(p, lr=1e-3)])
def test_twenty_steps_separate_the_streams(connection, n, make, stories, batches):  # noqa: F811
    """SGD has no normalisation that could blow up rounding noise: the reads alone break the symmetry."""
    model = HCLlamaForCausalLM.from_prenorm(stories, connection=connection, hc_mult=n)
    losses = train(model, make(model.parameters()), batches.repeat(2, 1, 1)[:20])
    assert sum(losses[-5:]) < sum(losses[:5])
    seen = []
    model.model.layers[-1].register_forward_pre_hook(lambda module, args: seen.append(args[0]))
    with torch.no_grad():
        model(batches[0])
    first, *others = seen[0].unbind(-2)
    assert max((first - other).norm() / first.norm() for other in others) > 1e-3


SCRATCH = [{"connection": "keel", "hc_mult": 1}, {"norm": "dyt"}, {"norm": "derf", "connection": "mhc"}]


@pytest.mark.parametrize("fields", [*({"connection": name} for name in CONNECTIONS), *SCRATCH])
def test_checkpointed_gradients(fields, ids):
    model = hc_llama(**fields)
    gradients = []
    for enable in (False, True):
        if enable:
            model.gradient_checkpointing_enable()
        model.zero_grad()
        model.train()(ids, labels=ids).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))


KEEL, DUAL = SCRATCH[0], {"connection": "dual", "hc_mult": 2}
ATTNRES, SKIP = {"connection": "attnres", "hc_mult": 1}, {"connection": "skip", "hc_mult": 2}
ALTUP = [{"connection": "altup", "hc_mult": 2}, {"connection": "altup", "hc_selection": "same"}]
NORMS = [{"norm": "dyt"}, {"norm": "derf"}, {**KEEL, "norm": "dyt"}, {"connection": "frac", "norm": "derf"}]


@pytest.mark.parametrize("fields", [KEEL, DUAL, SKIP, *ALTUP, *NORMS], ids=str)
@torch.no_grad()
def test_saved_loaded_generated_with_and_without_cache(fields, ids, tmp_path):
    model = randomized(hc_llama(**fields), 0.1).eval()
    model.save_pretrained(tmp_path)
    again = HCLlamaForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    assert torch.equal(again(ids).logits, model(ids).logits)
    settings = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    cached, plain = (model.generate(ids, **settings, use_cache=use) for use in (True, False))
    assert torch.equal(cached, plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fields", [KEEL, DUAL, SKIP, *ALTUP], ids=str)
@torch.no_grad()
def test_hidden_states_keep_the_dtype(fields, dtype, ids):
    model = hc_llama(**fields).to(dtype)
    assert {state.dtype for state in model(ids, output_hidden_states=True).hidden_states} == {dtype}


@pytest.mark.slow
@connections
@torch.no_grad()
def test_compiles(connection, ids):
    model = hc_llama(num_hidden_layers=2, connection=connection).eval()
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True)
    torch.testing.assert_close(compiled(ids).logits, model(ids).logits, **COMPILED)


@pytest.mark.slow
@pytest.mark.parametrize("fields", SCRATCH)
@torch.no_grad()
def test_models_from_scratch_have_no_graph_breaks(fields, ids):
    model = hc_llama(**fields).eval()
    compiled = torch.compile(model, fullgraph=True, backend="eager")
    assert torch.equal(compiled(ids).logits, model(ids).logits)


@pytest.mark.slow
@pytest.mark.parametrize("fields", SCRATCH)
@torch.no_grad()
def test_models_from_scratch_load_without_the_package(fields, tmp_path):
    model = hc_llama(**fields).eval()
    model.save_pretrained(tmp_path / "saved")
    model.save_pretrained(tmp_path / "again")
    case = {"base": str(tmp_path / "saved"), "converted": [str(tmp_path / "again")], "attention": "sdpa"}
    case |= {"dtypes": ["float32"], "prompts": [[5, 6, 7, 8], [9, 10]]}
    (found,) = elsewhere([{"comparisons": [case], "new_tokens": 8}], tmp_path).values()
    assert found == []


@connections
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_connections_stay_in_float32(connection, dtype, stories):
    readout = "mean" if connection == "frac" else "learned"
    model = HCLlamaForCausalLM.from_prenorm(stories, connection=connection, dtype=dtype, hc_readout=readout)
    dtypes = {name: p.dtype for name, p in model.named_parameters()}
    assert {d for name, d in dtypes.items() if "_hc." in name or "hc_head" in name} == {torch.float32}
    assert any("hc_head" in name for name in dtypes) == (readout == "learned")
    assert {d for name, d in dtypes.items() if "_hc." not in name and "hc_head" not in name} == {dtype}


@pytest.mark.parametrize("connection", ["dhc", "mhc", "ihc"])
@torch.no_grad()
def test_learned_readout(connection, stories, tmp_path):
    """Starts as the mean, and its parameters are saved and loaded."""
    ids = torch.randint(3, 512, (2, 48), generator=torch.Generator().manual_seed(0))
    model = HCLlamaForCausalLM.from_prenorm(stories, connection=connection, hc_readout="learned")
    expected = LlamaForCausalLM.from_pretrained(stories)(ids, output_hidden_states=True)
    found = model(ids, output_hidden_states=True)
    torch.testing.assert_close(found.logits, expected.logits, **READS_SUM_TO_ONE)
    assert [state.shape for state in found.hidden_states] == [state.shape for state in expected.hidden_states]
    for parameter in model.model.layers[-1].hc_head.parameters():
        parameter.add_(torch.randn_like(parameter))
    model.model.layers[0].attn_hc.get_parameter("base" if connection != "dhc" else "static_alpha").add_(0.3)
    trained = model(ids).logits
    model.save_pretrained(tmp_path)
    assert torch.equal(HCLlamaForCausalLM.from_pretrained(tmp_path)(ids).logits, trained)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"hc_mult": 0}, "at least 1"),
        ({"hc_mult": 2.5}, "hc_mult"),
        ({"hc_mult": "4"}, "hc_mult"),
        ({"hc_tanh": 1}, "hc_tanh"),
        ({"hc_readout": "max"}, "'mean', 'sum'"),
        ({"norm": "rms"}, "'dyt', 'derf'"),
        ({"connection": "xhc"}, "'connection' expected one of .'shc', 'dhc'"),
        ({"connection": "mhc", "hc_mult": 1}, "hc_mult must be at least 2 with connection 'mhc'"),
        ({"connection": "mhc", "hc_sinkhorn_iters": 0}, "a whole number, at least 1"),
        ({"connection": "frac", "hc_mult": 5}, "must be a divisor of hidden_size, 32"),
        ({"connection": "frac", "hc_readout": "sum"}, "are joined"),
        ({"connection": "keel"}, "hc_mult must be 1 with connection 'keel'"),
        ({"connection": "dual"}, "hc_mult must be 2 with connection 'dual'"),
        ({**DUAL, "hc_readout": "sum"}, "with connection 'dual' .*: it has a readout of its own"),
        ({"connection": "altup", "hc_selection": "first"}, "expected one of .'alternating', 'same'"),
        ({"connection": "attnres", "hc_mult": 4}, "hc_mult must be 1 with connection 'attnres'"),
        ({**ATTNRES, "hc_block": 0}, "hc_block must be a whole number, at least 1 .got 0"),
        ({**ATTNRES, "hc_attention": "max"}, "'hc_attention' expected one of .'sum', 'mean'"),
        ({**ATTNRES, "hc_readout": "sum"}, "hc_readout must be 'mean' with connection 'attnres' .*: it has a readout"),
    ],
)
def test_refused_fields(fields, message):
    with pytest.raises(StrictDataclassError, match=message):
        HCLlamaConfig(hidden_size=32, **fields)


def test_the_command_line_refuses_a_width_that_is_no_divisor(llama_folder, tmp_path, capsys):
    assert cli.main(["convert", str(llama_folder), str(tmp_path / "out"), "--connection", "frac", "-n", "5"]) == 1
    assert "--hc-mult must be a divisor of hidden_size, 32, with connection 'frac' (got 5)." in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fields", SCRATCH)
def test_a_model_from_scratch_has_nothing_to_be_verified_against(fields, tmp_path, capsys):
    hc_llama(**fields).save_pretrained(tmp_path)
    assert cli.main(["verify", str(tmp_path)]) == 1
    assert "was trained from scratch" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("connection", "fields"),
    [("mhc", {"hc_eps": 1e-3, "hc_sinkhorn_iters": 5}), ("altup", {"hc_selection": "same"})],
)
def test_fields_of_one_connection_can_be_given(connection, fields, llama_folder, llama, ids):
    loaded = HCLlamaForCausalLM.from_prenorm(llama_folder, connection=connection, dtype=torch.float32, **fields)
    with torch.no_grad():
        expected = llama(ids).logits
        for model in (loaded, convert_model(llama, connection=connection, **fields)):
            assert {name: getattr(model.config, name) for name in fields} == fields
            assert torch.allclose(model(ids).logits, expected, **READS_SUM_TO_ONE)


@pytest.mark.parametrize("connection", ["mhc", "ihc"])
def test_another_eps_is_verified_as_untrained(connection, llama_folder, llama, tmp_path):
    config = HCLlamaConfig.from_prenorm(llama.config, connection=connection, hc_eps=1e-3)
    HCLlamaForCausalLM.from_pretrained(llama_folder, config=config).save_pretrained(tmp_path)
    report = verify_checkpoint(tmp_path, str(llama_folder), mode="structure")
    assert report.passed
    assert not report.trained
