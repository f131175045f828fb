"""`hf-hyperconn inspect` of local folders; of Hub repos, see test_hub.py."""

import json
import os
import shutil
import subprocess
import sys
import tracemalloc
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_hyperconn import HCLlamaForCausalLM
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.inspection import inspect_checkpoint
from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.models.sub_layers import is_of_connection

from .conftest import hc_llama
from .pages import REPOSITORY
from .tiny import tiny

CONNECTIONS = ("shc", "dhc", "mhc", "ihc", "frac")


@pytest.fixture(scope="module")
def converted(llama_folder, tmp_path_factory) -> dict[str, Path]:
    """The tiny Llama with every connection that it can be converted to."""
    place = tmp_path_factory.mktemp("converted")
    return {
        name: convert_checkpoint(str(llama_folder), place / name, connection=name, verify="structure").path
        for name in CONNECTIONS
    }


@pytest.fixture
def out(converted, tmp_path) -> Path:
    return shutil.copytree(converted["dhc"], tmp_path / "out")


def configure(folder: Path, **changes) -> Path:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize("connection", CONNECTIONS)
def test_a_conversion(connection, converted, llama, llama_folder):
    folder = converted[connection]
    inspection = inspect_checkpoint(str(folder))
    model = AutoModelForCausalLM.from_pretrained(folder)
    facts = {
        **{"name": str(folder), "family": "Llama", "model_type": "hc_llama", "connection": connection, "hc_mult": 4},
        **{"layers": 3, "hidden_size": 32, "dtype": "F32", "quantized": None},
        **{"base": llama_folder.name, "commit": None, "trained": False, "not_known": None},
        "parameters": model.num_parameters(),
        "added_parameters": model.num_parameters() - llama.num_parameters(),
    }
    assert vars(inspection).items() >= facts.items()
    sub_layers = [(i, name) for i in range(3) for name in ("attention", "mlp")]
    assert [(part.layer, part.sub_layer) for part in inspection.drift] == sub_layers
    assert all((part.alpha, part.beta, part.dynamic) == (0.0, 0.0, 0.0) for part in inspection.drift)


def test_lines(converted, llama_folder):
    inspection = inspect_checkpoint(str(converted["dhc"]))
    lines = dict(line.split(maxsplit=1) for line in inspection.lines())
    assert lines["model"] == f"{converted['dhc']}: Llama, 3 layers, hidden 32, F32"
    assert lines["connection"] == "dhc, n=4"
    assert lines["base"] == llama_folder.name
    assert lines["parameters"] == f"{inspection.parameters:,}, +5.1 % by the connections (1,500)"
    assert lines["state"] == "the hyper-connections are at the equivalent initialization"


@pytest.mark.parametrize("connection", CONNECTIONS)
@pytest.mark.parametrize("shard", ["50GB", "30KB"])
def test_a_trained_model_as_transformers_saves_it(connection, shard, converted, ids, tmp_path, capsys):
    """A single file or shards, without the record of the conversion."""
    model = AutoModelForCausalLM.from_pretrained(converted[connection])
    before = {name: value.clone() for name, value in model.state_dict().items()}
    torch.manual_seed(0)
    with torch.no_grad():  # equal streams would give mHC gradients of rounding alone
        for name, parameter in model.named_parameters():
            if is_of_connection(name):
                parameter.add_(0.01 * torch.randn_like(parameter))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "trained", max_shard_size=shard)
    assert (tmp_path / "trained" / "model.safetensors").is_file() == (shard == "50GB")

    inspection = inspect_checkpoint(str(tmp_path / "trained"))
    assert (inspection.trained, inspection.base, inspection.commit) == (True, None, None)
    assert inspection.parameters == model.num_parameters()
    for part in inspection.drift:
        name = f"model.layers.{part.layer}.{'attn_hc' if part.sub_layer == 'attention' else 'mlp_hc'}"
        moved = {key: (value - before[key]).abs() for key, value in model.state_dict().items() if key.startswith(name)}
        if connection in ("mhc", "ihc"):
            reads, writes, mixes = moved[f"{name}.base"].split([4, 4, len(moved[f"{name}.base"]) - 8])
            alpha, beta = torch.cat([reads, mixes]).max(), writes.max()
        else:
            alpha, beta = moved[f"{name}.static_alpha"].max(), moved[f"{name}.static_beta"].max()
        assert (part.alpha, part.beta) == (alpha.item(), beta.item())
        assert part.alpha > 0.001
        assert (part.dynamic > 0) == (connection != "shc")

    assert main(["inspect", str(tmp_path / "trained")]) == 0
    head, *rows = capsys.readouterr().out.splitlines()[-5:]
    assert head.split() == ["drift", "attention", "MLP"]
    first = (getattr(part, name) for part in inspection.drift[:2] for name in ("alpha", "beta", "dynamic"))
    assert rows[1].split() == ["0", *(f"{value:.3g}" for value in first)]


def test_drift_is_that_of_the_sub_layer_and_part(converted, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(converted["dhc"])
    connection = model.model.layers[1].mlp_hc
    with torch.no_grad():
        connection.static_alpha[2, 3] -= 0.25
        connection.static_beta[1] += 0.5
        connection.dynamic_alpha_fn[:, 2] = 1.0
        connection.dynamic_alpha_scale.fill_(-0.125)
    model.save_pretrained(tmp_path / "trained")
    inspection = inspect_checkpoint(str(tmp_path / "trained"))
    moved = [(part.layer, part.sub_layer) for part in inspection.drift if part.alpha or part.beta or part.dynamic]
    assert moved == [(1, "mlp")]
    part = inspection.drift[3]
    # a column of 32 ones has the norm 5.7, whose tanh is 1 within 3e-5
    assert (part.alpha, part.beta) == (0.25, 0.5)
    assert part.dynamic == pytest.approx(0.125, rel=1e-4)


def test_a_change_outside_the_table_is_training_too(converted, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(converted["dhc"])
    with torch.no_grad():
        model.model.layers[2].attn_hc.norm.weight[0] = 1.5
    model.save_pretrained(tmp_path / "trained")
    assert inspect_checkpoint(str(tmp_path / "trained")).trained is True


@pytest.mark.parametrize(
    "fields", [{"connection": "keel", "hc_mult": 1}, {"norm": "dyt"}, {"norm": "derf", "connection": "shc"}], ids=str
)
def test_a_kind_without_equivalent_initialisation(fields, tmp_path):
    model = hc_llama(**fields)
    model.save_pretrained(tmp_path)
    inspection = inspect_checkpoint(str(tmp_path))
    assert (inspection.trained, inspection.drift) == (None, None)
    assert inspection.parameters == model.num_parameters()
    names = [name for name, _ in model.named_parameters() if "_hc." in name]
    assert inspection.added_parameters == sum(model.get_parameter(name).numel() for name in names)
    assert "is trained from scratch and has no equivalent initialization (" in inspection.lines()[-1]


def test_from_scratch_with_a_learned_readout(tmp_path):
    model = hc_llama(hc_readout="learned")
    model.save_pretrained(tmp_path)
    inspection = inspect_checkpoint(str(tmp_path))
    assert inspection.trained is False
    added = (name for name, _ in model.named_parameters() if "_hc." in name or "hc_head" in name)
    assert inspection.added_parameters == sum(model.get_parameter(name).numel() for name in added)


def test_a_model_without_a_head(llama, llama_folder, tmp_path):
    """Its embedding is looked up; that of a language model whose head is tied to it is multiplied, too."""
    whole = HCLlamaForCausalLM.from_prenorm(llama_folder, hc_mult=2)
    assert not whole.config.tie_word_embeddings
    whole.save_pretrained(tmp_path / "whole")
    whole.model.save_pretrained(tmp_path / "body")
    body, whole = (inspect_checkpoint(str(tmp_path / name)) for name in ("body", "whole"))
    assert (body.trained, whole.trained) == (False, False)
    assert whole.flops - body.flops == 2 * llama.lm_head.weight.numel()
    assert whole.parameters - body.parameters == llama.lm_head.weight.numel()


def test_a_quantised_model(out):
    quantized = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    inspection = inspect_checkpoint(str(configure(out, quantization_config=quantized)))
    assert (inspection.quantized, inspection.parameters, inspection.flops) == ("bitsandbytes", None, None)
    assert inspection.added_parameters > 0
    assert inspection.added_flops > 0
    assert inspection.trained is False
    (parameters,) = (line for line in inspection.lines() if line.startswith("parameters"))
    assert "(the base's are not known: it is quantized)" in parameters


def test_connections_in_another_dtype(converted, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(converted["dhc"])
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16()
    model.save_pretrained(tmp_path)
    inspection = inspect_checkpoint(str(tmp_path))
    assert inspection.trained is None
    assert inspection.lines()[-1].endswith("is BF16 [4, 5], not F32 [4, 5]")


def test_json(converted, capsys):
    assert main(["inspect", str(converted["shc"]), "--json"]) == 0
    printed = capsys.readouterr()
    assert printed.err == ""
    facts = json.loads(printed.out)
    assert facts == json.loads(json.dumps(inspect_checkpoint(str(converted["shc"])).as_dict()))
    untrained = {"alpha": 0.0, "beta": 0.0, "dynamic": 0.0}
    assert facts["drift"][1] == {"stack": "", "layer": 0, "sub_layer": "mlp", **untrained}


def test_a_reader_that_goes_is_no_error(converted):
    """As `head` does when it has its lines."""
    reading, writing = os.pipe()
    os.close(reading)
    command = [sys.executable, "-m", "hf_hyperconn.conversion", "inspect", str(converted["dhc"])]
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, env=environment)
    os.close(writing)
    assert done.returncode == 0
    assert "roken" not in done.stderr


def test_a_plain_model(llama_folder, capsys):
    assert main(["inspect", str(llama_folder)]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err == (
        f"error: '{llama_folder}' is a plain Llama, without hyper-connections. Convert it: hf-hyperconn convert "
        f"{llama_folder}\n"
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": ["llama"]}, r"has model_type \['llama'\]; give a checkpoint with hyper-connections"),
        ({"model_type": "albert"}, "has model_type 'albert'; give a checkpoint with hyper-connections"),
        ({"hc_mult": 0}, "has hc_mult 0, not a size of a model"),
        ({"hidden_size": "wide"}, "has hidden_size 'wide', not a size of a model"),
        ({"num_hidden_layers": None}, "has num_hidden_layers None, not a size of a model"),
        (
            {"connection": "xhc"},
            "has connection 'xhc'; known are shc, dhc, mhc, ihc, frac, keel, attnres, altup, dual, skip",
        ),
        (
            {"connection": "mhc", "hc_mult": 1},
            "has fields of no model: hc_mult must be at least 2 with connection 'mhc' .got 1",
        ),
        ({"hidden_size": 10**400}, "has hidden_size 10000000000000000000, not a size of a model"),
        ({"architectures": [{"name": "HCLlamaForCausalLM"}]}, "has architectures .*, not a list of names"),
        ({"hc_base_model": 5}, "has hc_base_model 5, not a name"),
        ({"hc_base_model": "org/base", "hc_base_commit": "../main"}, "has hc_base_commit '../main', not a commit"),
    ],
)
def test_refused(changes, message, out):
    with pytest.raises(UnsupportedCheckpointError, match=message):
        inspect_checkpoint(str(configure(out, **changes)))


@pytest.mark.parametrize("changes", [{"hidden_size": 10**9}, {"hc_mult": 10**6}], ids=str)
def test_sizes_beyond_the_weights_take_no_memory(changes, out):
    configure(out, **changes)
    tracemalloc.start()
    inspection = inspect_checkpoint(str(out))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert inspection.not_known == "all weights together are smaller than one connection of the sizes in config.json"
    assert peak < 2**24


def test_an_eps_of_no_conversion_or_of_no_model(converted, tmp_path):
    folder = shutil.copytree(converted["mhc"], tmp_path / "out")
    not_known = inspect_checkpoint(str(configure(folder, hc_eps=0.5))).not_known
    assert not_known.startswith("in config.json, hc_eps must be at least 1e-30 and below 0.1 (got 0.5)")
    for eps in (None, "small", -1e-6):
        with pytest.raises(UnsupportedCheckpointError, match="of no model: hc_eps must be a number, at least 1e-30"):
            inspect_checkpoint(str(configure(folder, hc_eps=eps)))


def test_refused_without_the_numbers_of_experts(tmp_path):
    tiny("olmoe").save_pretrained(tmp_path / "base")
    out = convert_checkpoint(str(tmp_path / "base"), tmp_path / "out", verify="off").path
    assert inspect_checkpoint(str(out)).family == "Olmoe"
    with pytest.raises(UnsupportedCheckpointError, match="does not say how many experts there are and how many"):
        inspect_checkpoint(str(configure(out, num_experts_per_tok=None)))


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [10**400, 1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [-1, 1], "data_offsets": [0, 4]},
        {"dtype": ["F32"], "shape": [1], "data_offsets": [0, 4]},
    ],
    ids=("huge", "negative", "dtype"),
)
def test_refused_for_a_header_that_contradicts_itself(entry, out):
    header = json.dumps({"model.layers.0.mlp.up_proj.weight": entry}).encode()
    (out / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(UnsupportedCheckpointError, match="is cut short or not a safetensors file"):
        inspect_checkpoint(str(out))


def test_refused_without_a_base(out):
    (out / "model-00002-of-00002.safetensors").rename(out / "model.safetensors")
    with pytest.raises(UnsupportedCheckpointError, match="are connections alone. Give a complete checkpoint"):
        inspect_checkpoint(str(out))


def test_a_config_of_another_size(out):
    inspection = inspect_checkpoint(str(configure(out, num_hidden_layers=4)))
    assert inspection.trained is None
    assert inspection.lines()[-1].endswith("not known: the tensor model.layers.3.attn_hc.static_alpha is missing")


def test_a_broken_record(out):
    (out / "hyperconn_conversion.json").write_text("{")
    with pytest.raises(UnsupportedCheckpointError, match="hyperconn_conversion.json of .* is not JSON"):
        inspect_checkpoint(str(out))
