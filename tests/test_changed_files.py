"""The verifier notices code, config and other files that are not what was written, and says what they differ from."""

import json
import shutil
from pathlib import Path

import pytest

import hf_hyperconn
from hf_hyperconn import HCLlamaForCausalLM
from hf_hyperconn.conversion.checkpoint.checkpoint import Checkpoint
from hf_hyperconn.conversion.checkpoint.source import GENERATE, LocalSource
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.refresh import refresh
from hf_hyperconn.conversion.verify import verify_checkpoint
from hf_hyperconn.conversion.verify.changed_files import config_differences
from tests.conftest import randomise_connections
from tests.hub import sha256

from .families import FAMILIES

CODE, RECORD = "modeling_hyper_connections.py", "hyperconn_conversion.json"
RELEASE = f"hf_hyperconn {hf_hyperconn.__version__}'s"
WRITTEN = "is not as the conversion wrote it"


@pytest.fixture(scope="module")
def base(llama_folder, tmp_path_factory) -> Path:
    """A Llama with a file beside it that models have."""
    folder = shutil.copytree(llama_folder, tmp_path_factory.mktemp("base") / "base")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="module")
def pristine(base, tmp_path_factory) -> Path:
    return convert_checkpoint(str(base), tmp_path_factory.mktemp("v") / "out", verify="structure").path


@pytest.fixture
def out(pristine, tmp_path) -> Path:
    return shutil.copytree(pristine, tmp_path / "out")


def append(file: Path, text: str = "\n# mine\n") -> None:
    file.write_text(file.read_text() + text)


def edit(file: Path, **changes) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_a_conversion_says_nothing_of_its_files(out, base):
    for report in (verify_checkpoint(out, mode="structure"), verify_checkpoint(out, str(base), mode="structure")):
        assert (report.passed, report.as_converted, report.changes, report.notes) == (True, True, (), ())


@pytest.mark.parametrize("mode", ["structure", "full"])
def test_a_line_more_of_code_fails(mode, out, base, capsys):
    append(out / CODE)
    finding = f"{CODE} {WRITTEN}, nor {RELEASE}"
    assert main(["verify", str(out), "--against", str(base), "--mode", mode]) == 3
    printed = capsys.readouterr()
    assert printed.err == f"error: verification failed: {finding}.\n"
    assert f"changed       {finding}" in printed.out.splitlines()
    assert main(["verify", str(out), "--json"]) == 3
    facts = json.loads(capsys.readouterr().out)
    assert facts["changes"] == [{"name": CODE, "finding": finding.removeprefix(f"{CODE} "), "fails": True}]


FIELDS = {
    "rope_theta": (5.0, "rope_theta is 5.0"),
    "rms_norm_eps": (0.01, "rms_norm_eps is 0.01, in the base 1e-06"),
    "num_attention_heads": (2, "num_attention_heads is 2, in the base 4"),
    "hc_readout": ("sum", "hc_readout is 'sum', of a conversion 'mean' or 'weighted'"),
}


@pytest.mark.parametrize("field", FIELDS)
def test_an_altered_field_of_the_config_fails_by_structure_alone(field, out, base, tmp_path):
    """By its digest; beside the base, and for a record without digests, by its value."""
    value, found = FIELDS[field]
    base = shutil.copytree(base, tmp_path / "base")
    if field == "rope_theta":  # as releases of Transformers before 5 write it
        theirs = json.loads((base / "config.json").read_text())
        theirs |= theirs.pop("rope_parameters")
        (base / "config.json").write_text(json.dumps(theirs))
        found += f", in the base {theirs[field]}"
        out = convert_checkpoint(str(base), tmp_path / "older", verify="structure").path
    also = {"num_key_value_heads": 1, "head_dim": 16} if field == "num_attention_heads" else {}  # the weights fit
    edit(out / "config.json", **{field: value}, **also)
    assert verify_checkpoint(out, mode="structure").failure == f"config.json {WRITTEN}"
    record = json.loads((out / RECORD).read_text())
    for files in (record["files"], None):
        edit(out / RECORD, files=files)
        failure = verify_checkpoint(out, str(base), mode="structure").failure
        if field == "rope_theta":  # which Transformers reads into rope_parameters
            assert failure.startswith("config.json: rope_parameters is ")
        else:
            assert failure == f"config.json: {found}"


def test_a_field_that_makes_connections_look_trained_fails(llama_folder, tmp_path):
    """The connections of mHC are at their start for one hc_eps only."""
    out = convert_checkpoint(str(llama_folder), tmp_path / "out", connection="mhc", verify="structure").path
    edit(out / "config.json", hc_eps=1e-3)
    report = verify_checkpoint(out, mode="structure")
    assert (report.trained, report.as_converted, report.failure) == (True, True, f"config.json {WRITTEN}")


def test_an_altered_index_fails(out):
    append(out / "model.safetensors.index.json", "\n")
    assert verify_checkpoint(out).failure == f"model.safetensors.index.json {WRITTEN}"


def test_other_files_are_reported_alone(out, base, capsys):
    append(out / "chat_template.jinja")
    (out / "generation_config.json").unlink()
    (out / "evil.py").write_text("import os\n")
    assert main(["verify", str(out), "--against", str(base), "--mode", "structure"]) == 0
    assert capsys.readouterr().out.splitlines()[-3:] == [
        f"changed       chat_template.jinja {WRITTEN}",
        "note          generation_config.json, which the conversion copied, is missing",
        "note          evil.py is not of the model's code",
    ]


def test_a_way_to_generate_that_was_put_there_fails(out, base, capsys):
    """Transformers would run it, with trust_remote_code."""
    (out / "custom_generate").mkdir()
    (out / GENERATE).write_text("def generate(model, **arguments): ...\n")
    finding = f"{GENERATE} is code that `generate` would run"
    for against in ([], ["--against", str(base), "--mode", "structure"]):
        assert main(["verify", str(out), *against]) == 3
        printed = capsys.readouterr()
        assert printed.err == f"error: verification failed: {finding}.\n"
        assert f"changed       {finding}" in printed.out.splitlines()
    randomise_connections(HCLlamaForCausalLM.from_pretrained(out)).save_pretrained(out)
    report = verify_checkpoint(out, mode="structure")
    assert (report.passed, report.as_converted, report.changes) == (True, False, ())
    assert finding in report.notes


def test_code_in_folders_is_noted(out):
    (out / "custom_generate").mkdir()
    (out / ".cache").mkdir()
    (out / "checkpoint-20").mkdir()
    for name in ("custom_generate/helper.py", ".cache/other.py", "checkpoint-20/modeling_hc_llama.py"):
        (out / name).touch()
    assert verify_checkpoint(out).notes == ("custom_generate/helper.py is not of the model's code",)
    for name in "abcd":
        (out / "custom_generate" / f"{name}.py").touch()
    (note,) = verify_checkpoint(out).notes
    assert note.endswith("custom_generate/c.py and 2 more are not of the model's code")


def test_code_is_held_against_the_record_and_the_package(out):
    """Which of the two it differs from is said; a record of another release is as good as ours."""
    append(out / CODE)
    record = json.loads((out / RECORD).read_text())
    edit(out / RECORD, files={**record["files"], CODE: sha256(out / CODE)})
    report = verify_checkpoint(out)
    assert report.passed
    (change,) = report.changes
    assert str(change) == f"{CODE} is as recorded of the conversion, but differs from {RELEASE}, which made it"

    versions = {**record["versions"], "hf_hyperconn": "0.0.1"}
    edit(out / RECORD, versions=versions)
    report = verify_checkpoint(out)
    assert (report.passed, report.changes) == (True, ())
    (note,) = report.notes
    assert note.startswith("code is of hf_hyperconn 0.0.1 and Transformers ")
    assert note.endswith(f": {CODE} (`hf-hyperconn refresh` brings it up to date)")

    package = Path(hf_hyperconn.__file__).parent / "models" / CODE
    shutil.copy(package, out / CODE)
    assert verify_checkpoint(out).failure == f"{CODE} {WRITTEN}, but {RELEASE}"

    (out / RECORD).unlink()
    assert verify_checkpoint(out).changes == ()
    append(out / CODE)
    report = verify_checkpoint(out)
    assert report.passed
    assert [str(change) for change in report.changes] == [f"{CODE} differs from {RELEASE}"]


@pytest.mark.parametrize("made", ["trained", "over", "from_prenorm"])
def test_of_a_saved_model_differences_are_reported(made, out, base, tmp_path):
    """Transformers writes config, index and code anew: that is no difference, what somebody altered is."""
    if made == "from_prenorm":
        model = HCLlamaForCausalLM.from_prenorm(base, hc_mult=4)
    else:
        model = randomise_connections(HCLlamaForCausalLM.from_pretrained(out))
    saved = out if made == "over" else tmp_path / "saved"
    model.save_pretrained(saved)
    for against in (None, str(base)):
        report = verify_checkpoint(saved, against, mode="structure")
        assert (report.passed, report.as_converted, report.changes, report.notes) == (True, False, (), ())

    older = shutil.copytree(base, tmp_path / "older spelling")
    theirs = json.loads((older / "config.json").read_text())
    theirs |= {"torch_dtype": theirs.pop("dtype"), "rope_theta": theirs.pop("rope_parameters")["rope_theta"]}
    (older / "config.json").write_text(json.dumps({**theirs, "rope_scaling": None, "transformers_version": "4.40.0"}))
    assert verify_checkpoint(saved, str(older), mode="structure").notes == ()

    append(saved / CODE)
    rope = {**json.loads((saved / "config.json").read_text())["rope_parameters"], "rope_theta": 5.0}
    edit(saved / "config.json", rope_parameters=rope, rms_norm_eps=0.01, hc_readout="sum")
    report = verify_checkpoint(saved, str(base), mode="structure")
    assert report.passed
    assert [change.name for change in report.changes] == [CODE]
    assert RELEASE in report.changes[0].finding
    assert [note.split(" is ")[0] for note in report.notes] == [
        f"config.json: {field}" for field in ("rms_norm_eps", "rope_parameters", "hc_readout")
    ]


@pytest.mark.parametrize("value", [None, [], {}, "x" * 1000, -1, 1e400, {"a": {"b": [1]}}])
@pytest.mark.parametrize("field", ["rope_parameters", "num_attention_heads", "layer_types", "id2label", "dtype"])
def test_fields_of_any_kind_are_compared(field, value, tmp_path):
    config = {"model_type": "hc_llama", "hc_readout": "mean", field: value}
    checkpoint = Checkpoint(LocalSource(tmp_path), config, FAMILIES["llama"])
    assert config_differences(checkpoint, {"model_type": "llama", field: value}) == []
    found = config_differences(checkpoint, {"model_type": "llama", field: "other", "vocab_size": 3})
    assert all(len(difference) < 200 for difference in found)
    assert any("vocab_size" in difference for difference in found)


def test_a_refresh_leaves_code_for_generate(out):
    """It replaces no such file, so it asks for nothing."""
    (out / "custom_generate").mkdir()
    (out / GENERATE).write_text("x = 1\n")
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "hc_version": "0.0.9"}))
    refresh(out)
    assert (out / GENERATE).read_text() == "x = 1\n"
