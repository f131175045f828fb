"""The verifier: what it passes, what it reports and what it fails."""

import copy
import errno
import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaForCausalLM, LlavaConfig

from hf_hyperconn import HCLlamaForCausalLM
from hf_hyperconn.conversion import cli
from hf_hyperconn.conversion.checkpoint.checkpoint_files import read_weights
from hf_hyperconn.conversion.checkpoint.loading import without_kernels
from hf_hyperconn.conversion.checkpoint.source import RECORD, LocalSource
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.files.writing import lock
from hf_hyperconn.conversion.verify import numeric, verify_checkpoint
from hf_hyperconn.errors import HyperConnError, UnsupportedCheckpointError, VerificationError

from .conftest import randomise_connections
from .edits import edit_tensors

BASE, ADDED = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def pristine(llama_folder, tmp_path_factory) -> Path:
    return convert_checkpoint(str(llama_folder), tmp_path_factory.mktemp("v") / "out", verify="structure").path


@pytest.fixture
def out(pristine, tmp_path) -> Path:
    return shutil.copytree(pristine, tmp_path / "out")


def test_passes_a_conversion(out, llama_folder):
    report = verify_checkpoint(out, str(llama_folder))
    assert report.passed
    assert (report.trained, report.changed, report.layers) == (False, 0, (3, 3))
    assert all(comparison.equal for comparison in report.comparisons)
    assert verify_checkpoint(out).passed


def test_reports_a_trained_checkpoint_without_failing(out, llama_folder, ids, tmp_path):
    model = AutoModelForCausalLM.from_pretrained(out)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(ids, labels=ids).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "trained")
    report = verify_checkpoint(tmp_path / "trained", str(llama_folder))
    assert report.passed
    assert report.trained
    assert report.changed > 0
    (comparison,) = report.comparisons
    assert not comparison.equal
    assert comparison.max_difference > 0
    assert comparison.kl > 0
    assert 0 <= comparison.top1 <= 1
    assert "trained" in report.lines()[0]
    assert "top-1 agreement" in report.lines()[-1]


def test_a_trained_checkpoint_may_have_more_tokens(out, llama_folder, tmp_path):
    """As for a chat; of an untrained one that is a difference."""
    model = AutoModelForCausalLM.from_pretrained(out)
    model.resize_token_embeddings(100, mean_resizing=False)
    model.save_pretrained(tmp_path / "resized")
    assert "in the base F32 [96, 32]" in verify_checkpoint(tmp_path / "resized", str(llama_folder)).failure
    randomise_connections(model).save_pretrained(tmp_path / "trained")
    report = verify_checkpoint(tmp_path / "trained", str(llama_folder))
    assert report.passed
    assert report.changed == 2
    assert "config.json: vocab_size is 100, in the base 96" in report.notes
    assert "logits not compared: they are of other tokens than the base's" in report.notes
    edit_tensors(tmp_path / "trained" / "model.safetensors", lambda tensors: tensors["model.norm.weight"].resize_(31))
    assert not verify_checkpoint(tmp_path / "trained", str(llama_folder)).passed


def test_a_trained_checkpoint_may_be_saved_in_another_dtype(tmp_path, llama, ids):
    copy.deepcopy(llama).bfloat16().save_pretrained(tmp_path / "base")
    model = HCLlamaForCausalLM.from_prenorm(tmp_path / "base", dtype=torch.float32)
    with torch.no_grad():
        model.model.layers[0].attn_hc.static_beta.add_(0.1)
    model.save_pretrained(tmp_path / "trained")
    report = verify_checkpoint(tmp_path / "trained", str(tmp_path / "base"))
    assert report.passed
    assert report.trained
    assert {comparison.dtype for comparison in report.comparisons} == {"bfloat16", "float32"}


def test_says_that_base_weights_are_not_compared(llama_folder, tmp_path):
    """Without verification a local base is not read, and a digest of it not recorded; a comparison records it."""
    out = convert_checkpoint(str(llama_folder), tmp_path / "out", verify="off").path
    note = f"base weights not compared: no digest was recorded of {BASE} (--against BASE does)"
    assert verify_checkpoint(out).notes == (note,)
    assert main(["verify", str(out), "--against", str(llama_folder), "--mode", "structure"]) == 0
    assert verify_checkpoint(out).notes == ()
    edit_tensors(out / BASE, lambda tensors: tensors["model.norm.weight"].add_(1))
    assert verify_checkpoint(out).failure == f"{BASE} is not as the conversion wrote it"


@pytest.mark.parametrize("how", ["replaced", "edited", "edited behind a link", "held"])
def test_a_comparison_is_recorded_of_what_was_compared_alone(how, llama_folder, tmp_path, monkeypatch, capsys):
    base = shutil.copytree(llama_folder, tmp_path / "base")
    link = "symlink" if how == "edited behind a link" else "copy"
    out = convert_checkpoint(str(base), tmp_path / "out", verify="off", link=link).path
    other = shutil.copytree(llama_folder, tmp_path / "other")
    edit_tensors(other / "model.safetensors", lambda tensors: tensors["model.norm.weight"].add_(1))

    def meanwhile(*arguments, **options):
        report = verify_checkpoint(*arguments, **options)
        if how == "replaced":
            convert_checkpoint(str(other), out, verify="off", force=True)
        elif how.startswith("edited"):
            edit_tensors((out / BASE).resolve(), lambda tensors: tensors["model.norm.weight"].add_(1))
        else:
            holding.enter_context(lock(out))
        return report

    monkeypatch.setattr(cli, "verify_checkpoint", meanwhile)
    with ExitStack() as holding:
        assert main(["verify", str(out), "--against", str(base), "--mode", "structure"]) == 1
    said = "another conversion is working in" if how == "held" else "was changed while it was compared with the base"
    assert said in capsys.readouterr().err
    assert json.loads((out / "hyperconn_conversion.json").read_text())["verification"] is None


def test_finds_a_damaged_file_without_the_base(llama_folder, tmp_path):
    out = convert_checkpoint(str(llama_folder), tmp_path / "out", layers=1).path
    assert verify_checkpoint(out).passed
    content = bytearray((out / BASE).read_bytes())
    content[-5] ^= 1
    (out / BASE).write_bytes(content)
    assert verify_checkpoint(out).failure == f"{BASE} is not as the conversion wrote it"


def test_fails_a_changed_base_tensor(out, llama_folder, capsys):
    edit_tensors(out / BASE, lambda tensors: tensors["model.norm.weight"].mul_(1.5))
    assert main(["verify", str(out), "--against", str(llama_folder)]) == 3
    printed = capsys.readouterr()
    assert printed.err == (
        "error: verification failed: 1 tensors differ from the base's, though the hyper-connections are untrained.\n"
    )
    assert "1 differ from the base's" in printed.out


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda t: t.pop("model.layers.1.mlp_hc.static_beta"), "mlp_hc.static_beta is missing"),
        (lambda t: t.update({"model.layers.0.attn_hc.static_beta": torch.ones(5)}), "F32 [5], not F32 [4]"),
        (
            lambda t: t.update({"model.layers.0.attn_hc.static_beta": torch.ones(4).half()}),
            "F16 [4], not F32 [4]",
        ),
    ],
)
def test_fails_wrong_hyper_connections(edit, message, out):
    edit_tensors(out / ADDED, edit)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    tensors = load_file(out / ADDED)
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v != ADDED or k in tensors}
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    report = verify_checkpoint(out)
    assert not report.passed
    assert message in report.failure


def test_fails_a_base_tensor_too_few(out, llama_folder):
    edit_tensors(out / BASE, lambda tensors: tensors.pop("model.norm.weight"))
    index = json.loads((out / "model.safetensors.index.json").read_text())
    del index["weight_map"]["model.norm.weight"]
    (out / "model.safetensors.index.json").write_text(json.dumps(index))
    assert verify_checkpoint(out, str(llama_folder)).failure == "the tensor model.norm.weight is missing"


def test_fails_missing_code_and_classes(out):
    (out / "hyper_connections.py").unlink()
    assert (
        verify_checkpoint(out).failure == "the code file hyper_connections.py is missing. Run `hf-hyperconn refresh`"
    )
    config = json.loads((out / "config.json").read_text())
    del config["auto_map"]["AutoModel"]
    (out / "config.json").write_text(json.dumps(config))
    assert "auto_map" in verify_checkpoint(out).failure


def test_a_difference_in_the_computation_fails(out, llama_folder):
    """Equal tensors are not enough: a readout that sums gives other logits, which is found without a record, too."""
    (out / "hyperconn_conversion.json").unlink()
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, "hc_readout": "sum"}))
    report = verify_checkpoint(out, str(llama_folder))
    assert report.changed == 0
    assert "in float32, logits, hidden states" in report.failure


def test_a_base_that_does_not_run_on_what_is_made_for_it(llama_folder, out, monkeypatch):
    def needs_more(*arguments, **named):
        raise ValueError("specify a language\nof the target")

    monkeypatch.setattr(LlamaForCausalLM, "generate", needs_more)
    report = verify_checkpoint(out, str(llama_folder))
    assert report.failure.startswith("LlamaForCausalLM can't run here (specify a language of the target), so ")
    assert "use --verify structure" in report.failure


def test_a_conversion_that_fails_verification_is_kept_but_not_put_in_place(llama_folder, tmp_path, monkeypatch):
    from hf_hyperconn.conversion.verify import start as equivalent

    def wrong(*arguments):
        tensors = correct(*arguments)
        tensors["model.layers.0.attn_hc.static_beta"][0] = 2.0
        return tensors

    correct = equivalent.hyper_connection_tensors
    calls = iter([wrong, correct])
    monkeypatch.setattr(equivalent, "hyper_connection_tensors", lambda *arguments: next(calls)(*arguments))
    with pytest.raises(VerificationError, match="not at the equivalent initialization. The result is kept in"):
        convert_checkpoint(str(llama_folder), tmp_path / "out", verify="structure")
    assert not (tmp_path / "out").exists()
    assert (tmp_path / ".out.incomplete" / ADDED).is_file()


def test_runs_the_layers_that_fit(out, llama_folder, monkeypatch):
    weights = read_weights(LocalSource(out))
    total = 4 * weights.parameters
    for free, expected in ((10 * total, 3), (0.85 * total, 1), (0, 1)):
        monkeypatch.setattr(numeric, "free_memory", lambda free=free: free)
        assert numeric.layers_that_fit(weights, 3) == expected
    report = verify_checkpoint(out, str(llama_folder))
    assert report.passed
    assert report.layers == (1, 3)
    assert "layers        the first 1 of 3" in report.lines()
    assert verify_checkpoint(out, str(llama_folder), layers=2).layers == (2, 3)
    assert verify_checkpoint(out, str(llama_folder), mode="full").layers == (3, 3)


def test_of_a_folder_that_may_only_be_read_nothing_is_recorded(llama_folder, tmp_path, monkeypatch, capsys):
    """As where a volume is mounted so; it is equal to its base all the same."""
    folder = convert_checkpoint(str(llama_folder), tmp_path / "out", verify="off").path

    def refuse(path, content):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))

    monkeypatch.setattr("hf_hyperconn.conversion.checkpoint.record.replace_file", refuse)
    before = (folder / RECORD).read_bytes()
    assert main(["verify", str(folder), "--against", str(llama_folder), "--mode", "structure"]) == 0
    assert "not recorded  '" in capsys.readouterr().err
    assert (folder / RECORD).read_bytes() == before


def test_what_a_volume_keeps_for_itself_is_no_part_of_a_checkpoint(llama_folder, tmp_path, monkeypatch):
    folder = shutil.copytree(llama_folder, tmp_path / "volume")
    walk = os.walk

    def refusing(top, onerror):
        onerror(PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(folder / closed)))
        return walk(top)

    monkeypatch.setattr(os, "walk", refusing)
    closed = "lost+found"
    assert "config.json" in LocalSource(folder).files
    closed = "notes"
    with pytest.raises(UnsupportedCheckpointError, match="can't read '.*notes': Permission denied"):
        LocalSource(folder)


def test_how_a_checkpoint_generates_is_not_asked_for(llama_folder, tmp_path):
    """Ten thousand beams would take all memory, and other ways can't run on a few tokens."""
    base = tmp_path / "base"
    shutil.copytree(llama_folder, base)
    asked = {"num_beams": 12000, "num_return_sequences": 4000, "penalty_alpha": 0.6, "top_k": 4, "eos_token_id": 2}
    (base / "generation_config.json").write_text(json.dumps(asked))
    out = convert_checkpoint(str(base), tmp_path / "out", hc_mult=2, verify="full").path
    assert json.loads((out / "generation_config.json").read_text()) == asked


def test_the_base_is_freed_before_the_conversion_is_loaded(out, llama_folder, monkeypatch):
    import weakref

    alive = []
    load = numeric._run

    def watch(model_class, *arguments):
        assert not any(reference() for reference in alive)
        original = model_class.from_pretrained

        def remember(*args, **kwargs):
            model, report = original(*args, **kwargs)
            alive.append(weakref.ref(model))
            return model, report

        with monkeypatch.context() as patch:
            patch.setattr(model_class, "from_pretrained", remember)
            return load(model_class, *arguments)

    monkeypatch.setattr(numeric, "_run", watch)
    verify_checkpoint(out, str(llama_folder))
    assert len(alive) == 2


def test_refuses_an_unknown_mode(out):
    with pytest.raises(HyperConnError, match="mode must be 'auto', 'full' or 'structure' .got 'quick'"):
        verify_checkpoint(out, mode="quick")


def test_refuses_what_is_no_conversion(llama_folder):
    with pytest.raises(UnsupportedCheckpointError, match="is a plain Llama, without hyper-connections. Convert it"):
        verify_checkpoint(llama_folder)


@pytest.mark.parametrize("name", ["some/kernel@main", "flash_attention_2", "flex_attention"])
def test_no_kernel_is_fetched_to_compare_models(name, llama_folder, out, tmp_path):
    """Whatever implementation a config names, the one that a plain load chooses is run."""
    base = shutil.copytree(llama_folder, tmp_path / "base")
    for folder in (base, out):
        path = folder / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), "_attn_implementation": name}))
    report = verify_checkpoint(out, str(base), accept_changes=True)
    assert report.passed
    assert len(report.comparisons) > 0


def test_which_implementations_are_run_as_a_config_names_them():
    config = LlavaConfig(text_config={"model_type": "olmoe"}, vision_config={"model_type": "clip_vision_model"})
    config._attn_implementation = {"": "some/kernel", "text_config": "some/kernel", "vision_config": "eager"}
    config._experts_implementation = "sonicmoe"
    assert without_kernels(config) is config
    found = [(each._attn_implementation, each._experts_implementation) for each in (config, config.text_config)]
    assert found == [(None, None)] * 2
    assert config.vision_config._attn_implementation == "eager"
    for named, run in (("sdpa", None), ("eager", "eager"), ("flash_attention_3", None)):
        config._attn_implementation = named
        assert without_kernels(config).text_config._attn_implementation == run
