"""The text of model cards, and their metadata as the Hub reads them."""

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import yaml
from huggingface_hub import ModelCard, constants

from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM
from hf_hyperconn.conversion.card import write_card
from hf_hyperconn.conversion.card.licenses import name_problem
from hf_hyperconn.conversion.checkpoint import readme
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.demo import byte_tokenizer
from hf_hyperconn.errors import CardError
from hf_hyperconn.kinds import CONVERTIBLE, KINDS
from tests.card_examples import CARDS, COMMIT, EXAMPLES, render
from tests.conftest import llama_config

from .conftest import BASE, BASE_CARD, results_file, sections, text_of


@pytest.mark.parametrize("name", EXAMPLES)
def test_examples_are_what_is_rendered_now(name, tmp_path):
    assert render(name, tmp_path) == (CARDS / f"{name}.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", EXAMPLES)
def test_huggingface_hub_reads_the_examples_and_writes_them_again(name):
    path = CARDS / f"{name}.md"
    card = ModelCard.load(path)
    assert str(card) == path.read_text(encoding="utf-8")
    base, *_ = EXAMPLES[name]
    assert (card.data.base_model, card.data["base_model_relation"]) == (base, "finetune")
    assert (card.data.library_name, card.data.pipeline_tag) == ("transformers", "text-generation")
    assert {"hyper-connections", "hf-hyperconn", "hc-x4", "custom_code"} <= set(card.data.tags)
    assert not {"datasets", "widget", "model-index", "co2_eq_emissions"} & card.data.to_dict().keys()


def test_metadata_is_inherited(converted):
    base, data = yaml.safe_load(BASE_CARD.split("---")[1]), ModelCard.load(converted / "README.md").data.to_dict()
    for name in ("license", "license_link", "language", "extra_gated_prompt", "extra_gated_fields"):
        assert data[name] == base[name]
    assert data["base_model"] == BASE
    assert data["tags"][-1] == "llama"
    assert not {"datasets", "widget", "model-index"} & data.keys()


def test_a_fresh_conversion_says_what_it_is(converted):
    text = text_of(converted)
    assert "It equals its base until it is trained" in text
    assert "**Built with Llama**" in text
    assert "With them come [LICENSE](LICENSE)." in text
    assert f"| commit | `{COMMIT}` |" in text
    assert f"hf-hyperconn convert {BASE} Llama-3.2-tiny-HCx4 -n 4 --revision {COMMIT}\n" in text
    assert "| float32 | logits, hidden states and greedy continuation equal to the base's, bit for bit |" in text
    assert "| layers run | 3 of 3 |" in text
    assert "Llama 3.2 Community License" in (converted / "Notice").read_text(encoding="utf-8")
    assert sections(text).keys() == {
        *("summary", "quick-start", "purpose", "changes", "conversion", "limitations", "licence", "citation")
    }


def test_a_trained_one_says_that_and_still_names_its_base(run):
    config = json.loads((run / "config.json").read_text())
    assert (config["hc_base_model"], config["hc_base_commit"]) == (BASE, COMMIT)
    written = write_card(run, update=True)
    text = text_of(run)
    assert "It has been trained with these connections" in text
    assert "equals its base" not in text
    assert f"| commit | `{COMMIT}` |" in text
    assert "hf-hyperconn convert" not in text
    assert "verification" not in text
    assert written.metadata["base_model"] == BASE
    assert written.metadata["license"] == "llama3.2"
    assert written.metadata["license_link"] == f"https://huggingface.co/{BASE}/blob/{COMMIT}/LICENSE"
    assert written.metadata["datasets"] == ["someone/tiny-texts"]
    assert "generated_from_trainer" in written.metadata["tags"]
    (warning,) = written.warnings
    assert "a copy of it with the weights" in warning

    state = json.loads((run / "trainer_state.json").read_text())
    first, *_, last = [entry["loss"] for entry in state["log_history"] if "loss" in entry]
    assert f"| loss | {first:.4f} at step 1, then {last:.4f} at step 2 |" in text
    assert "| steps | 2 |" in text


def test_the_quick_start_runs(folder, monkeypatch, capsys):
    byte_tokenizer().save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    write_card(folder)
    (code,) = re.findall(r"```python\n(.*?)```", text_of(folder), re.S)
    assert "trust_remote_code" in code
    monkeypatch.chdir(folder.parent)
    code = code.replace("Hyper-Connections are", "".join(map(chr, range(40, 44))))  # the model has 96 tokens
    exec(compile(code, "README.md", "exec"), {})
    assert config["vocab_size"] == 96
    assert len(capsys.readouterr().out) > 4


@pytest.mark.parametrize("connection", CONVERTIBLE)
def test_every_connection_has_a_card(connection, llama_folder, tmp_path):
    out = convert_checkpoint(str(llama_folder), tmp_path / "out", connection=connection, verify="structure").path
    summary = sections(text_of(out))["summary"]
    assert f"[{KINDS[connection].title}]({KINDS[connection].link})" in summary
    assert ("within rounding in float32" in summary) == (connection in ("mhc", "ihc"))
    assert ("in 4 parts" in summary) == (connection == "frac")
    assert "base_model" not in ModelCard.load(out / "README.md").data.to_dict()
    assert str(llama_folder.parent) not in text_of(out)


@pytest.mark.parametrize(
    "options",
    [
        ["-n", "3", "--readout", "weighted", "--no-tanh"],
        ["-n", "4", "--start", "history", "--history", "depth"],
        ["-n", "4", "--connection", "altup", "--selection", "same"],
        ["-n", "2", "--connection", "mhc", "--sinkhorn-iters", "3", "--eps", "0.001"],
        ["-n", "1", "--connection", "attnres", "--block", "2"],
    ],
    ids=" ".join,
)
def test_the_command_has_the_options_it_was_made_with(options, llama_folder, tmp_path):
    assert main(["convert", str(llama_folder), str(tmp_path / "out"), "-q", "--verify", "structure", *options]) == 0
    assert f"hf-hyperconn convert {llama_folder.name} out {' '.join(options)}\n" in text_of(tmp_path / "out")


def test_a_model_trained_from_scratch(tmp_path):
    fields = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = HCLlamaConfig(**fields, vocab_size=96, connection="keel", hc_mult=1)
    HCLlamaForCausalLM(config).save_pretrained(tmp_path / "scratch")
    written = write_card(tmp_path / "scratch")
    assert written.warnings == ()
    assert not {"base_model", "base_model_relation", "license"} & written.metadata.keys()
    text = text_of(tmp_path / "scratch")
    assert "A Llama model with [Keel's connections](https://arxiv.org/abs/2601.19895)" in text
    assert "base" not in text


def test_a_conversion_in_memory_names_its_base(converted, monkeypatch, tmp_path):
    HCLlamaForCausalLM.from_prenorm(BASE, cache_dir=converted.parent / "hub").save_pretrained(tmp_path / "saved")
    assert write_card(tmp_path / "saved").metadata["base_model"] == BASE
    base = llama_config()
    monkeypatch.chdir(tmp_path)
    Path(BASE).mkdir(parents=True)
    for local in (BASE, "/somewhere/else", ""):
        base.name_or_path = local
        assert not hasattr(HCLlamaConfig.from_prenorm(base), "hc_base_model")


def test_saving_over_a_conversion_is_noticed(folder):
    """The record stays, the connections may be at their start, yet the weights are others."""
    model = HCLlamaForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        model.lm_head.weight.add_(1)
    model.save_pretrained(folder)
    write_card(folder)
    assert "equals its base" not in text_of(folder)
    assert "The connections are at the equivalent initialization" in text_of(folder)


@pytest.mark.parametrize(
    ("name", "license", "accepted"),
    [
        ("Llama-3.2-1B-HCx4", "llama3.2", True),
        ("llama3.1-mine", "llama3.1", True),
        ("my-Llama-3.3", "llama3.3", False),
        ("Meta-Llama-3-8B-HCx4", "llama3", False),
        ("Llama-3-8B-HCx4", "llama3", True),
        ("Llama-8B-HCx4", "llama3", False),
        ("anything", "llama2", True),
        ("anything", "gemma", True),
        ("anything", "apache-2.0", True),
        ("anything", None, True),
    ],
)
def test_names_under_a_license(name, license, accepted):
    assert (name_problem(name, {"license": license}) is None) == accepted
    if license:
        assert (name_problem(name, {"license": "other", "license_name": license}) is None) == accepted


@pytest.mark.parametrize(
    "card",
    [
        "no metadata at all",
        "---\n[1, 2]\n---\n",
        "---\na: [\n---\n",
        "---\nlicense: {x: 1}\ntags: 3\n---\n",
        b"\xff\xfe",
        "---\nlicense: {x: 1}\n---\n",
    ],
)
def test_a_base_whose_card_says_nothing(card, llama_folder, tmp_path):
    source = shutil.copytree(llama_folder, tmp_path / "base")
    (source / "README.md").write_bytes(card if isinstance(card, bytes) else card.encode())
    lines = []
    out = convert_checkpoint(str(source), tmp_path / "out", verify="off", say=lines.append).path
    assert any("no license is known" in line for line in lines)
    assert "license" not in ModelCard.load(out / "README.md").data.to_dict()


def test_the_command(folder, tmp_path, capsys):
    renamed = folder.rename(tmp_path / "Kuzco-HCx4")
    assert main(["card", str(renamed)]) == 0
    printed = capsys.readouterr()
    assert printed.out == f"{renamed / 'README.md'}\n"
    assert printed.err.startswith(
        "warning: the license of the base (llama3.2) requires that the name of a model made from"
    )
    assert main(["card", str(renamed), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["files"] == [str(renamed / "README.md")]
    assert result["metadata"]["base_model"] == BASE


def test_errors_are_one_line_and_change_nothing(folder, llama_folder, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for arguments in (
        [tmp_path / "nowhere"],
        [tmp_path / "empty"],
        [llama_folder],
        [folder, "--results", tmp_path / "nowhere.json"],
        [folder, "--base-results", results_file(tmp_path)],
    ):
        assert main(["card", *map(str, arguments)]) == 1
        printed = capsys.readouterr()
        assert printed.out == ""
        assert printed.err.startswith("error: ")
        assert "unexpected" not in printed.err
    assert not (llama_folder / "README.md").exists()
    for content in (b"---\na: [\n---\n", b"---\n- a\n---\n", b"---\nmodel-index: [1]\n---\n", b"\xff\xfe"):
        (folder / "README.md").write_bytes(content)
        assert main(["card", str(folder), "--update"]) == 1
        assert "can't be read" in capsys.readouterr().err
        assert (folder / "README.md").read_bytes() == content


def test_a_license_that_can_not_be_read_is_said(run, monkeypatch, tmp_path):
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "empty"))
    unreadable, unknown = write_card(run, update=True).warnings
    assert "the card of the base, which names its license, can't be read" in unreadable
    assert "no license is known" in unknown


def test_tags_are_those_that_push_to_hub_gives(converted):
    model = HCLlamaForCausalLM.from_pretrained(converted)
    assert ModelCard.load(converted / "README.md").data.tags[:3] == model.model_tags


def test_a_base_in_norwegian(llama_folder, tmp_path):
    """Whose code YAML takes for false."""
    source = shutil.copytree(llama_folder, tmp_path / "base")
    (source / "README.md").write_text("---\nlanguage:\n- en\n- no\n---\n")
    out = convert_checkpoint(str(source), tmp_path / "out", verify="off").path
    for _ in range(2):
        assert yaml.safe_load(text_of(out).split("---")[1])["language"] == ["en", "no"]
        write_card(out)


def test_files_with_spaces_in_their_names(folder):
    (folder / "figures").mkdir()
    (folder / "figures" / "two words.png").write_bytes(b"")
    (folder / "LICENSE of code.txt").write_text("")
    write_card(folder)
    assert "![two words](figures/two%20words.png)" in text_of(folder)
    assert "[LICENSE of code.txt](LICENSE%20of%20code.txt)" in text_of(folder)


def test_metadata_with_a_date_as_json(folder, capsys):
    (folder / "README.md").write_text(text_of(folder).replace("license:", "released: 2026-11-21\nlicense:", 1))
    assert main(["card", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metadata"]["released"] == "2026-11-21"


def test_nothing_outside_the_folder_is_read_or_written(folder, tmp_path):
    outside = tmp_path / "outside.md"
    (folder / "README.md").rename(outside)
    (folder / "README.md").symlink_to(outside)
    before = outside.read_bytes()
    with pytest.raises(CardError, match="README.md' is a link to '.*', outside the folder. Remove it."):
        write_card(folder, results=results_file(tmp_path))
    assert outside.read_bytes() == before


def test_a_card_that_is_a_folder_or_can_not_be_read(folder, monkeypatch):
    before = text_of(folder)

    def refuse(*arguments):
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(readme, "read_text", refuse)
        with pytest.raises(CardError, match="can't read '.*README.md': Permission denied. Allow that, or remove it."):
            write_card(folder)
    assert text_of(folder) == before
    (folder / "README.md").unlink()
    (folder / "README.md").mkdir()
    with pytest.raises(CardError, match="can't write '.*README.md': Is a directory"):
        write_card(folder)
    assert not list(folder.glob(".*"))
