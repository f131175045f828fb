"""The files that a push sends, that the Hub copies, and that arrive."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import huggingface_hub
import pytest
import torch
from huggingface_hub import HfApi, ModelCard
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    HeliumConfig,
    HeliumForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    TrainingArguments,
)

from hf_hyperconn import HCLlamaForCausalLM, HCTrainer, convert_model
from hf_hyperconn.conversion.card import write_card
from hf_hyperconn.conversion.checkpoint.readme import README, with_repo_name
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.push import push_checkpoint
from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.families.family import find_family
from hf_hyperconn.families.modules import code_text
from tests.conftest import TINY, randomise_connections
from tests.families import FAMILIES
from tests.hub import files_in, sha256

from .conftest import assert_holds, connected, flip_last_byte, put_beside, shards, with_card, writes


@pytest.fixture(scope="module")
def trained(converted, tmp_path_factory) -> Path:
    """What Trainer saves in a step."""
    out = tmp_path_factory.mktemp("trained")
    model = HCLlamaForCausalLM.from_pretrained(converted)
    arguments = TrainingArguments(
        str(out), max_steps=1, save_steps=1, per_device_train_batch_size=1, report_to=[], use_cpu=True
    )
    row = torch.arange(3, 11)
    HCTrainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row}]).train()
    return out / "checkpoint-1"


def test_only_what_the_base_lacks_is_uploaded(hub, converted):
    said = []
    result = push_checkpoint(converted, "me/new", say=said.append)
    *base_shards, _ = shards(converted)
    assert len(base_shards) > 2
    hc = shards(converted)["hc"]
    assert hub.uploaded == [("me/new", sha256(hc), hc.stat().st_size)]
    assert list(result.copied) == base_shards
    small = {name: file.stat().st_size for name, file in files_in(hub.folder("me/new")).items()}
    assert result.uploaded.items() <= small.items()
    assert small.keys() - result.uploaded.keys() == {*base_shards, ".gitattributes"}
    (commit,) = hub.committed
    sent = {operation["value"]["path"]: operation["key"] for operation in commit}
    assert {name for name, key in sent.items() if key == "lfsFile"} == {*base_shards, hc.name}
    assert_holds(hub, "me/new", converted)
    assert "me/new" not in hub.private
    assert result.url == f"{hub.url}/me/new/commit/{result.commit}"
    assert hub.refs("me/new") == {"main": result.commit}
    assert not [line for line in said if line.startswith(("left here", "base weights"))]


def test_a_card_names_the_repo_that_it_is_pushed_to(hub, folder):
    local = (folder / README).read_bytes()
    assert f'model_id = "{folder.name}"'.encode() not in local, "it has the name of the conversion"
    push_checkpoint(folder, "me/named")
    assert (folder / README).read_bytes() == local
    pushed = hub.folder("me/named") / README
    assert 'model_id = "me/named"\n' in pushed.read_text()
    assert "<commit>" not in pushed.read_text()
    again = push_checkpoint(folder, "me/named")
    assert README in again.unchanged
    # the digest is of the new text: `card` renews it, and another push names another repo
    (folder / README).write_text(pushed.read_text())
    assert 'model_id = "team/named"\n' in with_repo_name(pushed.read_text(), "team/named")
    assert write_card(folder).kept == ()
    assert f'model_id = "{folder.name}"\n' in (folder / README).read_text()


def test_a_quick_start_that_a_person_wrote_is_pushed_as_it_is(hub, folder):
    text = (folder / README).read_text().replace("## Quick start", "## How to start")
    (folder / README).write_text(text)
    push_checkpoint(folder, "me/edited")
    assert (hub.folder("me/edited") / README).read_text() == text


def test_weights_may_be_links(hub, base, tmp_path):
    folder = convert_checkpoint(str(base), tmp_path / "linked", link="symlink", verify="structure").path
    assert all(file.is_symlink() for name, file in shards(folder).items() if name != "hc")
    push_checkpoint(folder, "me/linked")
    assert_holds(hub, "me/linked", folder)


def test_a_missing_card_is_mentioned(hub, folder):
    (folder / "README.md").unlink(missing_ok=True)
    said = []
    push_checkpoint(folder, "me/no-card", say=said.append)
    assert f"no card       `hf-hyperconn card '{folder}'` writes a README.md" in said


def test_who_keeps_repos_private_gets_a_private_one(hub, converted):
    hub.discreet.add("team")
    push_checkpoint(converted, "team/discreet")
    assert "team/discreet" in hub.private


def test_a_second_push_sends_what_changed(hub, folder):
    first = push_checkpoint(folder, "me/again")
    done = len(writes(hub))
    again = push_checkpoint(folder, "me/again")
    assert (again.url, again.copied, again.uploaded) == (first.url, (), {})
    assert set(again.unchanged) == files_in(folder).keys()
    assert len(writes(hub)) == done
    with_card(folder, license="apache-2.0")
    changed = push_checkpoint(folder, "me/again")
    assert changed.uploaded == {"README.md": (folder / "README.md").stat().st_size}
    assert changed.copied == ()
    assert_holds(hub, "me/again", folder)


def test_weights_that_would_be_loaded_instead_go(hub, base, converted, tmp_path):
    LlamaForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "single")
    hub.begin("me/old", private=False)
    api = HfApi()
    api.upload_folder(folder_path=tmp_path / "single", repo_id="me/old")
    (tmp_path / "notes.md").write_text("mine")
    api.upload_file(path_or_fileobj=str(tmp_path / "notes.md"), path_in_repo="notes.md", repo_id="me/old")
    result = push_checkpoint(converted, "me/old")
    assert result.removed == ("model.safetensors",)
    assert hub.folder("me/old").joinpath("notes.md").read_text() == "mine"
    hub.folder("me/old").joinpath("notes.md").unlink()
    assert_holds(hub, "me/old", converted)


BESIDE = ("checkpoint-1/config.json", "checkpoint-1/model.safetensors")


@dataclass
class OldCopy:
    """`CommitOperationCopy` of an older huggingface_hub."""

    src_path_in_repo: str
    path_in_repo: str
    src_revision: str | None = None


NOT_COPIED = {
    "gated": (lambda hub, patch: hub.gated.add("org/base"), "the Hub doesn't copy them from 'org/base'"),
    "regions": (lambda hub, patch: hub.elsewhere.add("org/base"), "the Hub doesn't copy them from 'org/base'"),
    "gone": (lambda hub, patch: hub.remove("org/base"), "'org/base' can't be read at the commit "),
    "client": (
        lambda hub, patch: patch.setattr(huggingface_hub, "CommitOperationCopy", OldCopy),
        "this release of huggingface_hub can't have them copied",
    ),
}


@pytest.mark.parametrize("case", NOT_COPIED)
def test_what_is_not_copied_is_uploaded(case, hub, converted, monkeypatch):
    refuse, reason = NOT_COPIED[case]
    refuse(hub, monkeypatch)
    said = []
    result = push_checkpoint(converted, "me/whole", private=True, say=said.append)
    (line,) = [line for line in said if line.startswith("base weights")]
    assert line.startswith(f"base weights  uploaded: {reason}")
    assert result.copied == ()
    assert {oid for _, oid, _ in hub.uploaded} == {sha256(file) for file in shards(converted).values()}
    assert len(hub.uploaded) == len(shards(converted))
    assert len(hub.committed) == 1
    assert_holds(hub, "me/whole", converted)
    assert "me/whole" in hub.private


def test_what_training_left_of_the_base_is_copied(hub, folder):
    """Of a trained checkpoint only the bytes of a shard say whether it is still the base's."""
    changed, *same = [file for name, file in shards(folder).items() if name != "hc"]
    flip_last_byte(changed)
    hc = shards(folder)["hc"]
    save_file({name: value + 0.1 for name, value in load_file(hc).items()}, hc, {"format": "pt"})
    result = push_checkpoint(folder, "me/changed")
    assert result.copied == tuple(file.name for file in same)
    assert {oid for _, oid, _ in hub.uploaded} == {sha256(changed), sha256(hc)}
    assert_holds(hub, "me/changed", folder)


def test_when_nothing_is_left_of_the_base(hub, folder):
    for file in shards(folder).values():
        save_file({name: value + 0.1 for name, value in load_file(file).items()}, file, {"format": "pt"})
    said = []
    result = push_checkpoint(folder, "me/all-changed", say=said.append)
    assert result.copied == ()
    assert "base weights  uploaded: 'org/base' has none of them that the Hub can copy" in said
    assert_holds(hub, "me/all-changed", folder)


def test_a_model_saved_over_its_conversion(hub, folder):
    """The record names shards that are gone."""
    model = randomise_connections(HCLlamaForCausalLM.from_pretrained(folder))
    model.save_pretrained(folder)
    assert not shards(folder)["hc"].exists()
    assert (folder / "model.safetensors.index.json").exists(), "of the shards that are gone"
    result = push_checkpoint(folder, "me/over")
    assert result.copied == ()
    assert "model.safetensors" in result.uploaded
    assert_holds(hub, "me/over", folder, files_in(folder).keys() - {"model.safetensors.index.json"})


def test_of_a_trainer_s_checkpoint_the_model_goes_up(hub, trained, tmp_path):
    folder = shutil.copytree(trained, tmp_path / "folder")
    put_beside(folder, ".git/HEAD", ".cache/huggingface/x", *BESIDE)
    left = {"optimizer.pt", "scheduler.pt", "rng_state.pth", "training_args.bin", "trainer_state.json"}
    assert left <= files_in(trained).keys()
    said = []
    result = push_checkpoint(folder, "me/trained", say=said.append)
    names = {"config.json", "generation_config.json", "model.safetensors", *FAMILIES["llama"].code({})}
    assert_holds(hub, "me/trained", folder, names)
    assert result.uploaded.keys() == names
    (line,) = [line for line in said if line.startswith("left here")]
    assert line == (
        "left here     checkpoint-1/config.json, checkpoint-1/model.safetensors, optimizer.pt and 4 more "
        "(--dry-run lists all, --include adds)"
    )
    assert set(result.left) == left | {*BESIDE}
    assert "the hyper-connections are trained" in said[0]


def test_a_branch_is_made(hub, converted, folder):
    push_checkpoint(with_card(folder, license="mit"), "me/branches")
    result = push_checkpoint(converted, "me/branches", revision="v2")
    assert result.uploaded.keys() == {"README.md"}
    with_card(folder, license="apache-2.0")
    result = push_checkpoint(folder, "me/branches", revision="v2")
    assert result.uploaded.keys() == {"README.md"}
    assert hub.refs("me/branches")["v2"] == result.commit
    assert_holds(hub, "me/branches", folder, revision="v2")
    assert 'license: "mit"' in (hub.folder("me/branches") / "README.md").read_text()


def test_a_pull_request(hub, converted, tmp_path):
    hub.begin("team/shared", private=False)
    before = hub.refs("team/shared")["main"]
    with connected(hub, tmp_path, token="hf_guest"):
        result = push_checkpoint(converted, "team/shared", create_pr=True)
    assert result.url == f"{hub.url}/team/shared/discussions/1"
    assert hub.refs("team/shared") == {"main": before, "refs/pr/1": result.commit}
    assert_holds(hub, "team/shared", converted, revision="refs/pr/1")


def test_stdout_carries_the_url_alone(hub, converted, capsys):
    assert main(["push", str(converted), "me/printed"]) == 0
    printed = capsys.readouterr()
    commit = hub.refs("me/printed")["main"]
    assert printed.out == f"{hub.url}/me/printed/commit/{commit}\n"
    assert "copied        " in printed.err
    assert main(["push", str(converted), "me/json", "--json", "-q", "--private"]) == 0
    printed = capsys.readouterr()
    facts = json.loads(printed.out)
    assert printed.err == ""
    assert (facts["folder"], facts["repo"], facts["commit"]) == (
        str(converted),
        "me/json",
        hub.refs("me/json")["main"],
    )
    assert facts["copied"]
    assert facts["uploaded"]["config.json"] == (converted / "config.json").stat().st_size
    assert "me/json" in hub.private


@pytest.mark.parametrize("how", ["from_prenorm", "convert_model"])
def test_push_to_hub_of_a_model(how, hub, base, converted):
    """Transformers' own push gives a repo of the same layout: code, classes, weights, tags."""
    if how == "from_prenorm":
        model = HCLlamaForCausalLM.from_prenorm(base, hc_mult=2)
    else:
        model = convert_model(LlamaForCausalLM.from_pretrained(base), hc_mult=2)
    model.push_to_hub("me/model")
    pushed = files_in(hub.folder("me/model"))
    assert {name for name in pushed if name.endswith(".py")} == set(FAMILIES["llama"].code({}))
    for name in FAMILIES["llama"].code({}):
        assert pushed[name].read_bytes() == (converted / name).read_bytes()
    config = json.loads(pushed["config.json"].read_text())
    assert config["auto_map"] == FAMILIES["llama"].auto_map
    assert config["architectures"] == ["HCLlamaForCausalLM"]
    assert pushed.keys() - FAMILIES["llama"].code({}).keys() == {
        *(".gitattributes", "README.md", "config.json", "generation_config.json", "model.safetensors")
    }
    assert ModelCard.load(pushed["README.md"]).data.tags == ["hyper-connections", "hf-hyperconn", "hc-x2"]
    ids = torch.arange(24).reshape(1, -1)
    with torch.no_grad():
        loaded = AutoModelForCausalLM.from_pretrained("me/model", trust_remote_code=True)
        assert torch.equal(loaded(ids).logits, model(ids).logits)


def test_code_that_is_no_file_here_is_one_on_the_hub(hub):
    model = convert_model(HeliumForCausalLM(HeliumConfig(**TINY, head_dim=8)), hc_mult=2)
    model.push_to_hub("me/helium")
    model.config.push_to_hub("me/config")
    for repo in ("me/helium", "me/config"):
        pushed = files_in(hub.folder(repo))
        assert {name for name in pushed if name.endswith(".py")} == set(find_family("helium").code({}))
        assert pushed["modeling_hc_helium.py"].read_text() == code_text("modeling_hc_helium.py")


def test_a_class_of_ones_own_makes_no_repo(hub):
    class MyLlama(LlamaForCausalLM):
        pass

    model = convert_model(MyLlama(LlamaConfig(**TINY)), hc_mult=2)
    with pytest.raises(UnsupportedCheckpointError, match="was made in this process"):
        model.push_to_hub("me/mine")
    assert hub.requests == []
