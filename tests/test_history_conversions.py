"""Conversions that start from the history, to attention residuals and to AltUp: exact, and known to every command."""

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from hf_hyperconn import HCLlamaForCausalLM, convert_model, hc_param_groups, load_hc, save_hc
from hf_hyperconn.analysis.unfolding import unfold_static
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.demo import byte_tokenizer
from hf_hyperconn.conversion.inspection import inspect_checkpoint
from hf_hyperconn.conversion.verify import verify_checkpoint
from hf_hyperconn.errors import HyperConnectionFileError, HyperConnError
from hf_hyperconn.models.readouts import WeightedReadout
from hf_hyperconn.training.monitor import hc_figures

from .marks import few
from .processes import elsewhere
from .test_exactness import DTYPES, PROMPTS

HISTORY = {"hc_start": "history"}
FAST = {
    "dhc×4 type": {"hc_mult": 4, **HISTORY},
    "shc×3 depth": {"connection": "shc", "hc_mult": 3, **HISTORY, "hc_history": "depth"},
    "attnres": {"connection": "attnres"},
    "attnres 2": {"connection": "attnres", "hc_block": 2},
    "altup": {"connection": "altup"},
    "skip": {"connection": "skip"},
}
OTHERS = {
    **{
        f"{connection}×{n} {history}": {"connection": connection, "hc_mult": n, **HISTORY, "hc_history": history}
        for connection, n, history in product(("shc", "dhc"), (2, 3, 4, 8), ("type", "depth"))
    },
    "attnres 4": {"connection": "attnres", "hc_block": 4},
}
SLOW = {name: OTHERS[name] for name in ("shc×2 type", "shc×8 depth", "dhc×2 depth", "dhc×8 type", "attnres 4")}
REST = {name: fields for name, fields in OTHERS.items() if name not in {**FAST, **SLOW}}
CASES = {**FAST, **SLOW}
WITHOUT_MATRICES = ("attnres", "skip")
LONG = {name: FAST[name] for name in ("dhc×4 type", "attnres 2")}


def differing(cases: dict, attention: str, new_tokens: int, stories: Path, place: Path) -> dict[str, list[str]]:
    """Return the differences that a process without this package finds, by case and dtype."""
    folders = {
        name: convert_checkpoint(str(stories), place / str(i), verify="structure", **fields).path
        for i, (name, fields) in enumerate(cases.items())
    }
    comparison = {
        "base": str(stories),
        "converted": list(map(str, folders.values())),
        "attention": attention,
        "dtypes": DTYPES,
        "prompts": AutoTokenizer.from_pretrained(stories)(PROMPTS)["input_ids"],
    }
    results = elsewhere([{"comparisons": [comparison], "new_tokens": new_tokens}], place)
    return {
        f"{name} {dtype}": results[f"{path} {dtype} {attention}"] for name, path in folders.items() for dtype in DTYPES
    }


@pytest.mark.parametrize(
    ("cases", "attention", "new_tokens"),
    [
        pytest.param(FAST, "sdpa", 12, id="fast"),
        pytest.param(LONG, "eager", 40, id="long", marks=pytest.mark.slow),
        pytest.param(SLOW, "sdpa", 12, id="slow", marks=pytest.mark.slow),
        pytest.param(REST, "sdpa", 12, id="rest", marks=[pytest.mark.slow, pytest.mark.tail]),
    ],
)
def test_equal_to_the_base_without_the_package(cases, attention, new_tokens, stories, tmp_path):
    differences = differing(cases, attention, new_tokens, stories, tmp_path)
    assert differences == dict.fromkeys(differences, [])
    assert len(differences) == 3 * len(cases)


@pytest.mark.parametrize("case", FAST)
@torch.no_grad()
def test_from_prenorm_equals_the_base(case, llama, llama_folder, ids):
    expected = llama(ids, output_hidden_states=True)
    outputs = HCLlamaForCausalLM.from_prenorm(llama_folder, **FAST[case]).eval()(ids, output_hidden_states=True)
    assert torch.equal(outputs.logits, expected.logits)
    assert all(map(torch.equal, outputs.hidden_states, expected.hidden_states))


@pytest.mark.slow
@pytest.mark.parametrize("case", ["dhc×4 type", "attnres 2"])
def test_equal_to_the_compiled_base_when_compiled(case, stories):
    ids = torch.randint(3, 512, (2, 48), generator=torch.Generator().manual_seed(0))
    logits, size = [], {"num_hidden_layers": 2}
    for model in (
        LlamaForCausalLM.from_pretrained(stories, **size),
        HCLlamaForCausalLM.from_prenorm(stories, **size, **FAST[case]),
    ):
        torch._dynamo.reset()
        with torch.no_grad():
            logits.append(torch.compile(model.eval(), fullgraph=True)(ids).logits)
    assert torch.equal(*logits)


@pytest.mark.parametrize("n", range(1, 9))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_weighted_readout_of_copies_is_exact(n, dtype):
    hidden = 100 * torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0)).to(dtype)
    streams = hidden.unsqueeze(-2).expand(2, 3, n, 16)
    assert torch.equal(WeightedReadout((1 / n,) * n)(streams), hidden)


def last_streams(model, ids) -> torch.Tensor:
    seen = []
    handle = model.model.layers[-1].register_forward_pre_hook(lambda module, args: seen.append(args[0].detach()))
    model(ids)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("history", ["type", "depth"])
@pytest.mark.parametrize("connection", ["shc", "dhc"])
def test_streams_differ_at_once_and_side_streams_learn_at_the_first_step(connection, history, llama_folder, ids):
    fields = {"connection": connection, **HISTORY, "hc_history": history}
    model = HCLlamaForCausalLM.from_prenorm(llama_folder, **fields).train()
    streams = last_streams(model, ids)
    for i in range(1, 4):
        assert (streams[..., i, :] - streams[..., 0, :]).abs().max() > 1e-3
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model(ids, labels=ids).loss.backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    changes = {name: (p.detach() - before[name]).abs() for name, p in model.named_parameters()}
    reads = torch.stack([change[1:, 0] for name, change in changes.items() if name.endswith("static_alpha")])
    assert (reads[1:] > 0).all()  # sub-layer 0 reads copies of the embedding
    # copies share one gradient, side streams have their own
    assert (reads[-1] - reads[-1][:1]).abs().max() > 0
    assert (changes["model.layers.2.hc_head.static_gamma"][1:] > 0).all()
    copies = HCLlamaForCausalLM.from_prenorm(llama_folder, connection=connection)
    streams = last_streams(copies, ids)
    assert torch.equal(streams, streams[..., :1, :].expand_as(streams))


@pytest.fixture(scope="module")
def converted(llama_folder, tmp_path_factory) -> dict[str, Path]:
    place = tmp_path_factory.mktemp("converted")
    return {
        name: convert_checkpoint(str(llama_folder), place / str(i), verify="full", **fields).path
        for i, (name, fields) in enumerate(FAST.items())
    }


@pytest.mark.parametrize("case", FAST)
def test_verified_inspected_and_trained(case, converted, llama_folder, tmp_path):
    config = json.loads((converted[case] / "config.json").read_text())
    assert FAST[case].items() <= config.items()
    assert verify_checkpoint(converted[case], str(llama_folder)).passed
    cut = verify_checkpoint(converted[case], str(llama_folder), mode="full", layers=2)
    assert (cut.passed, cut.layers, cut.comparisons[0].equal) == (True, (2, 3), True)
    model = HCLlamaForCausalLM.from_pretrained(converted[case])
    found = inspect_checkpoint(str(converted[case]))
    added = [p for name, p in model.named_parameters() if "_hc." in name or ".hc_head." in name]
    assert (found.trained, found.added_parameters) == (False, sum(p.numel() for p in added))
    with torch.no_grad():
        added[-1].add_(0.25)  # the readout's, or the last sub-layer's
    model.save_pretrained(tmp_path / "trained")
    found = inspect_checkpoint(str(tmp_path / "trained"))
    assert found.trained
    assert "trained" in "\n".join(found.lines())
    assert verify_checkpoint(tmp_path / "trained", str(llama_folder)).trained


def test_drift_of_a_readout_and_of_queries(converted, tmp_path):
    model = HCLlamaForCausalLM.from_pretrained(converted["dhc×4 type"])
    with torch.no_grad():
        model.model.layers[2].hc_head.static_gamma[3] = -0.5
    model.save_pretrained(tmp_path / "gamma")
    found = inspect_checkpoint(str(tmp_path / "gamma"))
    assert (found.trained, found.readout_drift) == (True, 0.5)
    assert found.lines()[-1] == "readout 0.5, its largest change"
    assert all((part.alpha, part.beta, part.dynamic) == (0, 0, 0) for part in found.drift)

    model = HCLlamaForCausalLM.from_pretrained(converted["attnres"])
    with torch.no_grad():
        model.model.layers[1].mlp_hc.query[:2] = torch.tensor([3.0, 4.0])
    model.save_pretrained(tmp_path / "query")
    found = inspect_checkpoint(str(tmp_path / "query"))
    assert [part.dynamic for part in found.drift] == [0, 0, 0, 5, 0, 0]
    assert found.readout_drift == 0


@pytest.mark.parametrize(
    ("case", "line", "command"),
    [
        ("dhc×4 type", "dhc, n=4, started from the history by type, readout weighted", "-n 4 --start history"),
        (
            "shc×3 depth",
            "shc, n=3, started from the history by depth, readout weighted",
            "-n 3 --connection shc --start history --history depth",
        ),
        ("attnres", "attnres, full", "-n 1 --connection attnres"),
        ("attnres 2", "attnres, blocks of 2 sub-layers", "-n 1 --connection attnres --block 2"),
        ("altup", "altup, n=4", "-n 4 --connection altup"),
        ("skip", "skip, of the normed embedding", "-n 2 --connection skip"),
    ],
    ids=FAST,
)
def test_inspect_and_card_say_what_it_is(case, line, command, converted, capsys):
    assert main(["inspect", str(converted[case])]) == 0
    assert f"connection    {line}\n" in capsys.readouterr().out
    card = (converted[case] / "README.md").read_text()
    assert f"{command}\n" in card
    assert line.partition(", ")[2] in card
    assert ("@inproceedings{zhu2025" in card) == ("hc" in case)


def test_the_default_name_of_attention_residuals(llama_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["convert", str(llama_folder), "--connection", "attnres", "--block", "2", "--verify", "structure", "-q"]
    assert main(command) == 0
    assert capsys.readouterr().out == "tiny-llama-AttnRes\n"
    assert (tmp_path / "tiny-llama-AttnRes" / "config.json").is_file()


def test_unfolded_matrices_of_a_history(llama):
    """What is read is Pre-Norm's sum; the side streams are its parts."""
    found = unfold_static(convert_model(llama, connection="shc", **HISTORY))
    assert torch.equal(found.inputs, torch.ones(7, 7).tril())
    last = found.streams[:, -1]
    attention, mlp = [1, 0, 1, 0, 1], [0, 1, 0, 1, 0]
    assert last[1].tolist() == [1, *attention, 0]
    assert last[2].tolist() == [1, *mlp, 0]
    assert last[3].tolist() == [1, *[0] * 6]


@pytest.mark.parametrize("case", few(FAST, "dhc×4 type"))
def test_plots(case, converted, tmp_path, capsys):
    byte_tokenizer().save_pretrained(converted[case])
    (tmp_path / "text").write_text("0123456789 !#$%" * 30)  # characters below the 96 tokens of the model
    command = ["plot", str(converted[case]), "--text", str(tmp_path / "text"), "-o", str(tmp_path / "pictures")]
    done = main(command)
    if case.startswith(WITHOUT_MATRICES):
        assert done == 1
        connection = FAST[case]["connection"]
        message = f"error: '{converted[case]}' has connection '{connection}', where no matrices read and mix streams"
        assert capsys.readouterr().err.startswith(message)
    else:
        assert (done, len(list((tmp_path / "pictures").iterdir()))) == (0, 4)


@pytest.mark.parametrize("case", FAST)
def test_weight_decay_and_the_monitor(case, llama, llama_folder, ids):
    model = HCLlamaForCausalLM.from_prenorm(llama_folder, **FAST[case])
    names = {id(p): name for name, p in model.named_parameters()}
    decayed = {
        names[id(p)] for group in hc_param_groups(model, 1, 0.1) if group["weight_decay"] for p in group["params"]
    }
    assert not [
        name for name in decayed if name.endswith(("static_gamma", "query", "prediction", "correction", "factors"))
    ]
    if case.startswith(WITHOUT_MATRICES):
        with pytest.raises(HyperConnError, match="has no streams that matrices read and mix"):
            hc_figures(model, ids)
    else:
        cosine = hc_figures(model, ids)["hc/stream_cosine"]
        assert (cosine < 0.999) == ("altup" not in case)


@pytest.mark.parametrize("case", FAST)
def test_connections_in_a_file_of_their_own(case, llama, tmp_path, ids):
    model = convert_model(llama, **FAST[case]).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "_hc." in name or ".hc_head." in name:
                parameter.add_(torch.randn_like(parameter) / 10)
        expected = model(ids).logits
        loaded = load_hc(llama, save_hc(model, tmp_path)).eval()
        assert torch.equal(loaded(ids).logits, expected)
    assert {name: getattr(loaded.config, name) for name in FAST[case]} == FAST[case]
    with pytest.raises(HyperConnectionFileError, match="belongs to another model"):
        load_hc(convert_model(llama), tmp_path)
