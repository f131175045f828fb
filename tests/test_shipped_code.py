"""The files of code that a model brings: those of its own kind, as their imports say."""

import ast
import json
import re
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from hf_hyperconn import convert_model
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.families.family import find_family
from hf_hyperconn.families.modules import MODELS
from hf_hyperconn.kinds import CONVERTIBLE, KINDS
from hf_hyperconn.models import chosen_code, shipped_code
from hf_hyperconn.models.connection_fields import ACCEPTED, CHOICES
from hf_hyperconn.models.shipped_code import CHOOSING_FIELDS, CHOOSING_MODULE, ROW, source_for, value_of

from .conftest import hc_llama
from .families import FAMILIES
from .isolated import isolated, printed
from .marks import few

LLAMA = FAMILIES["llama"]
# what every Llama brings, whatever its connections are
OF_ALL = {
    *("configuration_hc_llama.py", "modeling_hc_llama.py"),
    *("configuration_hyper_connections.py", "modeling_hyper_connections.py", "decoder_layer.py"),
    *("connection.py", "connection_fields.py", "connection_weights.py", "sub_layers.py", "transformers_seam.py"),
    *("chosen_code.py", "shipped_code.py", "pipeline_stages.py"),
}
HYPER = {
    *("computing.py", "hyper_connections.py", "hc_step.py", "hc_torch.py"),
    *("hc_kernels.py", "hc_triton.py", "norm_forms.py"),
}
MANIFOLD = {
    *("computing.py", "manifold_hyper_connections.py", "mhc_kernels.py"),
    *("mhc_triton.py", "readouts.py", "sinkhorn.py"),
}
# what a kind brings; any other kind brings its own module alone
OWN = {
    "shc": HYPER,
    "dhc": HYPER,
    "mhc": MANIFOLD,
    "ihc": MANIFOLD,
    "frac": {*HYPER, "frac_connections.py"},
    "attnres": {"attention_residuals.py", "attnres_kernels.py", "attnres_triton.py", "computing.py"},
    "altup": {*HYPER, "altup_connection.py"},
}
# what other fields of a DHC model add
ADDED = {
    "weighted": ({"hc_readout": "weighted"}, {"readouts.py"}),
    "learned": ({"hc_readout": "learned"}, {"readouts.py"}),
    "history": ({"hc_start": "history", "hc_readout": "weighted"}, {"readouts.py"}),
    "dyt": ({"norm": "dyt"}, {"dynamic_activations.py"}),
    "derf": ({"norm": "derf"}, {"dynamic_activations.py"}),
}
kinds = pytest.mark.parametrize("connection", KINDS)


def reached(texts: dict[str, str], named: set[str]) -> set[str]:
    """The files that are named, and what they import at any depth of indentation, by their syntax."""
    files, pending = set(), [*named]
    while pending:
        name = pending.pop()
        files.add(name)
        nodes = [node for node in ast.walk(ast.parse(texts[name])) if getattr(node, "level", 0)]
        pending += {f"{node.module}.py" for node in nodes} - files
    return files


def contents(folder: Path) -> dict[str, str]:
    return {path.name: path.read_text(encoding="utf-8") for path in folder.glob("*.py")}


def test_every_value_of_a_field_that_chooses_code_has_its_row():
    assert chosen_code.CONNECTIONS.keys() == KINDS.keys()
    assert {"mean", "sum", *chosen_code.READOUTS} == {*CHOICES["hc_readout"]}
    assert {None, *chosen_code.NORMS} == {*CHOICES["norm"]}
    values = [value for field in CHOOSING_FIELDS for value in CHOICES[field]]
    assert len({*values}) == len(values)
    source = (MODELS / f"{CHOOSING_MODULE}.py").read_text(encoding="utf-8")
    imported = [name for names in ROW.findall(source) for name in names.split(", ") if value_of(name) in values]
    tables = (value for name, value in vars(chosen_code).items() if name.isupper() and name != "CHOICES")
    assert sum(map(len, tables)) == len(imported)


@kinds
def test_a_model_brings_its_own_kind_alone(connection):
    own = {f"{chosen_code.CONNECTIONS[connection].__module__.rpartition('.')[2]}.py"}
    assert LLAMA.code({"connection": connection}).keys() == OF_ALL | OWN.get(connection, own)


@pytest.mark.parametrize("case", ADDED)
def test_a_field_adds_the_files_of_its_own_value(case):
    fields, files = ADDED[case]
    assert LLAMA.code(fields).keys() == OF_ALL | HYPER | files


@pytest.mark.parametrize("family", ["llama", *few(["gpt2", "llava", "whisper", "gemma4_text", "t5"])])
@kinds
def test_what_it_brings_is_what_it_imports(family, connection):
    family = find_family(family)
    texts = family.code({"connection": connection})
    assert reached(texts, {f"{name.partition('.')[0]}.py" for name in family.auto_map.values()}) == {*texts}
    for text in texts.values():  # as Transformers reads them
        assert {f"{name}.py" for name in re.findall(r"^\s*from\s+\.(\S+)\s+import", text, re.MULTILINE)} <= {*texts}


def test_branches_that_were_cut_bring_the_comparison_with_their_source():
    assert "layer_source.py" not in LLAMA.code({})
    assert "layer_source.py" in find_family("gpt2").code({})


def test_dhc_is_read_in_an_hour():
    texts = LLAMA.code({"connection": "dhc"})
    assert len(texts) <= 20
    assert sum(bool(line.strip()) for text in texts.values() for line in text.splitlines()) <= 3400


def test_no_file_is_long():
    assert [
        path.name for path in MODELS.glob("*.py") if len(path.read_text(encoding="utf-8").splitlines()) > 400
    ] == []


@kinds
def test_what_is_written_for_a_config_is_written_again_alike(connection):
    source = (MODELS / f"{CHOOSING_MODULE}.py").read_text(encoding="utf-8")
    config = hc_llama(connection=connection, hc_mult=ACCEPTED[connection].most or 2, norm="dyt").config
    written = source_for(vars(config), CHOOSING_MODULE, source)
    assert source_for(config.to_dict(), CHOOSING_MODULE, written) == written != source


LOADED = """
import sys
import torch
from transformers import AutoModelForCausalLM
folder, again, third = sys.argv[1:]
ids = torch.arange(3, 9)[None]
model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True).eval()
model.save_pretrained(again)
saved = AutoModelForCausalLM.from_pretrained(again, trust_remote_code=True).eval()
saved.save_pretrained(third)
with torch.no_grad():
    assert torch.equal(model(ids)[0], saved(ids)[0])
    print(model(ids)[0].tolist())
"""


def check_rounds(folder: Path, expected: torch.Tensor, place: Path) -> None:
    """A folder loads without the package, and what is saved of it, and again of that, has the same code."""
    logits = printed(LOADED, folder, place / "again", place / "third", place=place).splitlines()[-1]
    assert torch.equal(torch.tensor(json.loads(logits)), expected)
    assert contents(folder) == contents(place / "again") == contents(place / "third")


@pytest.mark.parametrize("connection", few(CONVERTIBLE, "dhc", "mhc", "attnres"))
@torch.no_grad()
def test_a_conversion_is_whole(connection, llama, llama_folder, tmp_path):
    n = ACCEPTED[connection].most or 2
    convert_checkpoint(str(llama_folder), tmp_path / "hc", connection=connection, hc_mult=n, verify="structure")
    config = json.loads((tmp_path / "hc" / "config.json").read_text())
    assert contents(tmp_path / "hc") == LLAMA.code(config)
    check_rounds(tmp_path / "hc", llama(torch.arange(3, 9)[None]).logits, tmp_path)
    convert_model(llama, connection=connection, hc_mult=n).save_pretrained(tmp_path / "in memory")
    assert contents(tmp_path / "in memory") == contents(tmp_path / "hc")


@pytest.mark.parametrize(
    "fields",
    few(
        [
            {"connection": "keel", "hc_mult": 1},
            {"connection": "dual", "hc_mult": 2},
            {"connection": "mhc", "hc_start": "biased"},
            *(fields for fields, _ in ADDED.values()),
        ],
        {"norm": "dyt"},
    ),
)
@torch.no_grad()
def test_a_model_made_from_a_config_is_whole(fields, tmp_path):
    model = hc_llama(**fields).eval()
    model.save_pretrained(tmp_path / "hc")
    assert contents(tmp_path / "hc") == LLAMA.code(model.config.to_dict())
    check_rounds(tmp_path / "hc", model(torch.arange(3, 9)[None]).logits, tmp_path)


def test_the_code_that_is_saved_is_what_ran(tmp_path, monkeypatch):
    """Another release may be installed meanwhile: the first model, of whatever kind, keeps all sources."""
    monkeypatch.setattr(shipped_code, "SOURCES", {})
    hc_llama()
    monkeypatch.setattr(shipped_code, "find_spec", None)
    hc_llama(connection="mhc").save_pretrained(tmp_path)
    assert contents(tmp_path).keys() == OF_ALL | MANIFOLD
    assert b"\r" not in (tmp_path / "modeling_hc_llama.py").read_bytes()


ANOTHER = """
import json, sys
import transformers
folder, fields = sys.argv[1], json.loads(sys.argv[2])
transformers.AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, **fields)
"""
BY_HAND = """
import json, sys
import transformers
folder, fields = sys.argv[1], json.loads(sys.argv[2])
config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=True)
transformers.AutoModelForCausalLM.from_config(type(config)(**{**config.to_dict(), **fields}), trust_remote_code=True)
"""


@pytest.mark.parametrize("script", [ANOTHER, BY_HAND], ids=["loaded", "made"])
@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"connection": "mhc"}, "connection must be 'dhc' (got 'mhc')."),
        ({"hc_readout": "weighted"}, "hc_readout must be 'mean' or 'sum' (got 'weighted')."),
        ({"norm": "dyt"}, "norm must be None (got 'dyt')."),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_another_kind_than_the_folder_has(script, fields, message, tmp_path):
    hc_llama().save_pretrained(tmp_path / "hc")
    done = isolated(script, tmp_path / "hc", json.dumps(fields), place=tmp_path)
    assert done.stderr.splitlines()[-1].startswith(f"ValueError: {message}")
    assert done.stderr.splitlines()[-1].endswith("install hf_hyperconn, which has all.")


def test_the_package_has_every_kind(tmp_path):
    hc_llama().save_pretrained(tmp_path / "hc")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hc", connection="mhc")
    model.save_pretrained(tmp_path / "mhc")
    assert contents(tmp_path / "mhc").keys() == OF_ALL | MANIFOLD
