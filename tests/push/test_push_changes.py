"""Changed code, config or companions, and malformed records, which a push does not publish unasked."""

import json
from pathlib import Path

import pytest

import hf_hyperconn
from hf_hyperconn import HCLlamaForCausalLM
from hf_hyperconn.conversion.checkpoint.source import GENERATE
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.push import push_checkpoint
from hf_hyperconn.errors import PushError
from tests.conftest import randomise_connections
from tests.hub import files_in, sha256

from .conftest import RECORD, assert_holds, change_record, writes

CODE = "modeling_hyper_connections.py"


def append(file: Path, text: str) -> None:
    file.write_text(file.read_text() + text)


def set_field(folder: Path, **fields) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **fields}))


CHANGES = {
    "code": (lambda folder: append(folder / CODE, "import os\n"), CODE),
    "config": (lambda folder: set_field(folder, rms_norm_eps=1e-2), "config.json"),
    "readout": (lambda folder: set_field(folder, hc_readout="sum"), "config.json"),
    "index": (lambda folder: append(folder / "model.safetensors.index.json", "\n"), "model.safetensors.index.json"),
    "companion": (lambda folder: append(folder / "generation_config.json", "\n"), "generation_config.json"),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_change_is_not_published_unasked(case, hub, folder, capsys):
    change, name = CHANGES[case]
    change(folder)
    assert main(["push", str(folder), "me/changed"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith(f"error: '{folder}' is not as it was written: {name} is not as the conversion wrote it")
    assert error.endswith("Check that, and publish it as it is with --accept-changes.")
    assert hub.requests == []
    assert main(["push", str(folder), "me/changed", "--accept-changes"]) == 0
    assert f"changed       {name} is not as the conversion wrote it" in capsys.readouterr().err
    assert_holds(hub, "me/changed", folder)


def test_a_way_to_generate_that_was_put_there_is_not_published_unasked(hub, folder, capsys):
    (folder / GENERATE).parent.mkdir()
    (folder / GENERATE).write_text("def generate(model, **arguments): ...\n")
    command = ["push", str(folder), "me/generating", "--include", GENERATE]
    assert main(command) == 1
    assert f"is not as it was written: {GENERATE} is code that `generate` would run" in capsys.readouterr().err
    assert hub.requests == []
    assert main([*command, "--accept-changes"]) == 0
    assert (hub.folder("me/generating") / GENERATE).is_file()
    assert GENERATE not in push_checkpoint(folder, "me/plain").uploaded


def test_base_weights_without_a_digest_are_compared_first(base, folder, hub, capsys):
    """As releases before this one recorded them of a local base; a comparison notes the digests."""
    record = json.loads((folder / RECORD).read_text())
    shards = [{**shard, "sha256": None} for shard in record["base_shards"]]
    change_record(folder, base_shards=shards)
    assert main(["push", str(folder), "me/compared"]) == 1
    assert "compared with its base (no digest was recorded of its base weights). Run" in capsys.readouterr().err
    assert hub.requests == []
    assert main(["verify", str(folder), "--against", str(base), "--mode", "structure"]) == 0
    assert json.loads((folder / RECORD).read_text()) == record
    assert main(["push", str(folder), "me/compared"]) == 0


def test_what_stays_here_may_change(hub, base, tmp_path):
    """A companion that no repo needs, as a conversion of a folder may bring one along."""
    from hf_hyperconn.conversion.convert import convert_checkpoint

    (base / "notes.md").write_text("of the base")
    try:
        folder = convert_checkpoint(str(base), tmp_path / "out", verify="structure").path
    finally:
        (base / "notes.md").unlink()
    assert "notes.md" in json.loads((folder / RECORD).read_text())["files"]
    append(folder / "notes.md", "and mine")
    result = push_checkpoint(folder, "me/notes")
    assert result.left == ("notes.md",)


def test_code_of_another_release_is_published_as_it_was_converted(hub, folder):
    append(folder / CODE, "# of a release to come\n")
    record = json.loads((folder / RECORD).read_text())
    files = {**record["files"], CODE: sha256(folder / CODE)}
    change_record(folder, files=files)
    with pytest.raises(PushError, match=f"{CODE} is as recorded of the conversion, but differs from hf_hyperconn"):
        push_checkpoint(folder, "me/release")
    change_record(folder, files=files, versions={**record["versions"], "hf_hyperconn": "99.0"})
    said = []
    push_checkpoint(folder, "me/release", say=said.append)
    assert [
        line for line in said if line.startswith("note          code is of hf_hyperconn 99.0 and") and CODE in line
    ]
    assert_holds(hub, "me/release", folder)


@pytest.mark.parametrize("record", ["none", "older", "kept"])
def test_of_a_trained_model_the_code_is_judged(record, hub, folder, tmp_path):
    """Transformers has written its config and index anew."""
    model = randomise_connections(HCLlamaForCausalLM.from_pretrained(folder))
    trained = folder if record != "none" else tmp_path / "trained"
    model.save_pretrained(trained)
    if record == "older":
        change_record(trained, files=None)
    push_checkpoint(trained, "me/trained")
    append(trained / CODE, "import os\n")
    with pytest.raises(PushError, match=f"{CODE} .*hf_hyperconn {hf_hyperconn.__version__}'s. Check"):
        push_checkpoint(trained, "me/trained")
    (trained / "evil.py").write_text("import os\n")
    said = []
    result = push_checkpoint(trained, "me/trained", accept_changes=True, say=said.append)
    assert result.uploaded.keys() == {CODE}
    assert "note          evil.py is not of the model's code" in said
    assert "evil.py" in result.left


def test_a_conversion_from_before_files_were_recorded(hub, folder):
    change_record(folder, files=None)
    push_checkpoint(folder, "me/older")
    assert_holds(hub, "me/older", folder)


COMPARISON = {
    **{"dtype": "float32", "logits": True, "hidden_states": True, "continuation": None},
    **{"max_difference": 0, "kl": 0, "top1": 1},
}
SHARD = {"file": "a", "source": "a", "size": 1, "sha256": None}
VERIFICATION = {"tensors": 1, "layers": None, "comparisons": [COMPARISON]}
ARGUMENTS = {"hc_mult": 4, "connection": "dhc", "hc_tanh": True}


def without(part: dict, name: str) -> dict:
    return {key: value for key, value in part.items() if key != name}


# changes of a record, by the fault that is named
MALFORMED = {
    "base_shards is None": {"base_shards": None},
    "base_shards is {'a': 1}": {"base_shards": {"a": 1}},
    "file of base_shards is None": {"base_shards": [{}]},
    "base_shards has no sha256": {"base_shards": [without(SHARD, "sha256")]},
    "size of base_shards is None": {"base_shards": [without(SHARD, "size")]},
    "size of base_shards is True": {"base_shards": [{**SHARD, "size": True}]},
    "sha256 of base_shards is 3": {"base_shards": [{**SHARD, "sha256": 3}]},
    "base is None": {"base": None},
    "base has no commit": {"base": {"model": "org/base"}},
    "model of base is 3": {"base": {"model": 3, "commit": None}},
    "commit of base is '../main'": {"base": {"model": "org/base", "commit": "../main"}},
    "hyper_connection_shard is ['a']": {"hyper_connection_shard": ["a"]},
    "hyper_connection_sha256 is 3": {"hyper_connection_sha256": 3},
    "files is ['config.json']": {"files": ["config.json"]},
    "'config.json' of files is None": {"files": {"config.json": None}},
    "'config.json' of files is '1'": {"files": {"config.json": "1"}},
    "versions is ['0.1.0']": {"versions": ["0.1.0"]},
    "hf_hyperconn of versions is []": {"versions": {"hf_hyperconn": []}},
    "hc_mult of arguments is True": {"arguments": {**ARGUMENTS, "hc_mult": True}},
    "connection of arguments is None": {"arguments": without(ARGUMENTS, "connection")},
    "base_card is 'llama3.2'": {"base_card": "llama3.2"},
    "comparisons of verification is None": {"verification": without(VERIFICATION, "comparisons")},
    "max_difference of comparisons is None": {
        "verification": {**VERIFICATION, "comparisons": [without(COMPARISON, "max_difference")]}
    },
    "layers of verification is None": {"verification": VERIFICATION},
}


@pytest.mark.parametrize("fault", MALFORMED)
def test_a_malformed_record_is_refused_by_every_command(fault, hub, folder, capsys):
    change_record(folder, **MALFORMED[fault])
    before = {name: sha256(file) for name, file in files_in(folder).items()}
    for command, *arguments in (["push", "me/malformed"], ["verify"], ["card"], ["inspect"]):
        assert main([command, str(folder), *arguments]) == 1
        assert (
            capsys.readouterr()
            .err.splitlines()[-1]
            .endswith(f"{RECORD} of '{folder}' is not as the converter writes it ({fault}). Convert the base again.")
        )
    assert writes(hub) == []
    assert {name: sha256(file) for name, file in files_in(folder).items()} == before


METADATA = [
    *("license: 3", "license: [1, 2]", "license: {a: b}", "license_name: [x]\nlicense: other", "1: 2", "tags: 3"),
    *("model-index: [1]", "model-index: {a: b}", "language: {a: b}", "eval_results: 3", "eval_results: [{a: b}]"),
    *("model_name: [1]", "- a"),
    *("base_model: {a: 1}", "extra_gated_prompt: [1, {a: b}]", "datasets: 2020-01-01", "null: null", "text"),
    *("license_link: {a: b}", "self: 1", "ignore_metadata_errors: 1", "content: 1", "license: 2020-01-01"),
]


@pytest.mark.parametrize("metadata", METADATA)
def test_metadata_of_any_kind_is_published_or_refused(metadata, hub, folder, capsys):
    (folder / "README.md").write_text(f"---\n{metadata}\n---\n# A model\n")
    hub.gated.add("org/base")
    code = main(["push", str(folder), "me/metadata"])
    error = capsys.readouterr().err.splitlines()[-1]
    assert "(unexpected" not in error
    assert code == 0 or error.startswith("error: ")
