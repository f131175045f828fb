"""READMEs and results that would take hours or gigabytes to read, or hold values that can't be written down."""

import json
import time
from pathlib import Path

import pytest

from hf_hyperconn.conversion.card.evaluation import read_evaluation
from hf_hyperconn.conversion.card.facts import training_facts
from hf_hyperconn.conversion.checkpoint.readme import (
    LARGEST_METADATA,
    add_digests,
    is_ours,
    merge,
    read_base_card,
    read_card,
    trainer_facts,
)
from hf_hyperconn.conversion.checkpoint.source import LocalSource
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.errors import CardError

BOMB = "\n".join(
    ["---", "license: mit", "a: &a [x, x, x, x, x, x, x, x, x]"]
    + [f"{new}: &{new} [{', '.join([f'*{old}'] * 9)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    + ["extra_gated_fields: *i", "---", "text"]
)
ITSELF = "---\ntags: &tags [*tags]\n---\n"
LONG = f"---\ntags: [{'a,' * LARGEST_METADATA}]\n---\n"
DEEP = f"---\ntags: {'[' * 100_000}\n---\n"
HALF = '---\nextra_gated_prompt: "\\uD800"\n---\n'


@pytest.fixture
def out(llama_folder, tmp_path) -> Path:
    return convert_checkpoint(str(llama_folder), tmp_path / "out", verify="off").path


@pytest.mark.parametrize("card", [BOMB, ITSELF, LONG, DEEP, HALF], ids=("bomb", "itself", "long", "deep", "half"))
def test_metadata_that_stand_for_more_than_is_written(card, out, capsys):
    (out / "README.md").write_text(card)
    assert read_base_card(LocalSource(out)) == {}, "it is inherited from"
    assert main(["card", str(out), "--update"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "the metadata of" in line
    assert "unexpected" not in line
    assert (out / "README.md").read_text() == card


def test_an_alias_is_named(tmp_path):
    assert len(BOMB) < 500
    (tmp_path / "README.md").write_text(BOMB)
    with pytest.raises(CardError, match=r"line 3 has an alias, \*a: write it out"):
        read_card(tmp_path / "README.md")


@pytest.mark.parametrize(("before", "line_end"), [("---\n", "\n"), ("", "\r"), ("\n\n", "\r\n")])
def test_metadata_are_checked_where_they_are_read(before, line_end, tmp_path):
    (tmp_path / "README.md").write_bytes(
        (before + BOMB.removesuffix("\ntext")).replace("\n", line_end).encode() + b"\n"
    )
    with pytest.raises(CardError, match=r"has an alias, \*a: write it out|can't be read"):
        read_card(tmp_path / "README.md")


def test_what_looks_like_an_alias_in_text_is_none(tmp_path):
    (tmp_path / "README.md").write_text("---\r\nlicense: mit\r\ntags: ['*a', \"&b\"]\r\n---\r\n*a &b\n---\n")
    assert read_card(tmp_path / "README.md").data.tags == ["*a", "&b"]


def test_a_readme_that_is_too_large(out, capsys):
    with (out / "README.md").open("wb") as file:
        file.truncate(3 * 10**9)
    assert read_base_card(LocalSource(out)) == {}
    assert main(["card", str(out), "--update"]) == 1
    assert "it holds more than 10,000,000 bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    "text",
    [
        "<!-- hf-hyperconn: a -->\n" * 20_000,
        "<!-- hf-hyperconn: a -->\n" * 20_000 + "<!-- /hf-hyperconn -->\n",
        "<!-- hf-hyperconn: a -->\n<!-- /hf-hyperconn -->\n" * 10_000,
        "\n" * 480_000,
        "# \n" * 160_000,
    ],
    ids=("opened", "opened and closed once", "closed", "empty lines", "headings"),
)
def test_marks_are_found_in_time_that_grows_with_the_text(text):
    started = time.perf_counter()
    is_ours(text)
    merge(
        text,
        add_digests("".join(f"<!-- hf-hyperconn: {name} -->\nx\n<!-- /hf-hyperconn -->\n" for name in "abcdefgh")),
    )
    trainer_facts(text)
    assert time.perf_counter() - started < 10, "and not with its square, which takes minutes"


NUMBERS = [10**400, float("nan"), float("inf"), True, "1", [1], None]


@pytest.mark.parametrize("value", NUMBERS, ids=lambda value: f"{value!r:.8}")
def test_numbers_that_are_none(value, tmp_path):
    number = "1e400" if value == 10**400 else json.dumps(value)
    metrics = f'{{"acc,none": 0.5, "acc_stderr,none": {number}, "other,none": {number}}}'
    config = f'{{"dataset_path": "a/b", "dataset_name": {number}, "test_split": {number}}}'
    path = tmp_path / "results.json"
    path.write_text(
        f'{{"lm_eval_version": "0.4", "config": {{}}, "results": {{"task": {metrics}}}, '
        f'"n-shot": {{"task": {number}}}, "configs": {{"task": {config}}}}}'
    )
    (score,) = read_evaluation(path).scores
    assert (score.value, score.error, score.shots) == (0.5, None, None)
    assert all(text is None or isinstance(text, str) for text in (score.subset, score.split))
    state = {name: value for name in ("global_step", "max_steps", "epoch", "num_input_tokens_seen")}
    entry = {name: value for name in ("loss", "eval_loss", "step", "train_runtime")}
    assert training_facts({**state, "log_history": [entry]}) == []


def test_a_card_that_is_a_link_to_itself_is_replaced(out):
    (out / "README.md").unlink()
    (out / "README.md").symlink_to("README.md")
    assert main(["card", str(out)]) == 0
    assert (out / "README.md").read_text().startswith("---\n")


@pytest.mark.parametrize("name", ["trainer_state.json", "hyperconn_conversion.json", "config.json"])
def test_what_a_link_leads_to_is_not_read(name, out, tmp_path, capsys):
    secret = tmp_path / "secret.json"
    if (out / name).exists():
        (out / name).rename(secret)
    else:
        secret.write_text(json.dumps({"global_step": 12345}))
    (out / name).symlink_to("../secret.json")
    before = (out / "README.md").read_bytes()
    assert main(["card", str(out)]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"'{out / name}' is a link to '{secret}', outside the folder. Put a file in its place" in line
    assert (out / "README.md").read_bytes() == before
