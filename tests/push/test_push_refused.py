"""Refusals of a push, by this package and by the Hub."""

import errno
import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from hf_hyperconn import HCLlamaForCausalLM
from hf_hyperconn.conversion.card import write_card
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.push import push_checkpoint
from hf_hyperconn.conversion.push.hub_refusals import explain_hub_errors
from hf_hyperconn.conversion.verify import verify_checkpoint
from hf_hyperconn.errors import HyperConnError, PushError
from tests.conftest import llama_config
from tests.hub import HubError
from tests.writable_hub import FULL

from .conftest import RECORD, assert_holds, change_record, connected, flip_last_byte, shards, with_card, writes


def link_out(folder: Path) -> None:
    (folder.parent / "secret").write_text("mine")
    (folder / "LICENSE.txt").symlink_to(folder.parent / "secret")


TERMS = {"license": "llama3.2", "license_link": "LICENSE", "extra_gated_prompt": "Accept this.\nAll of it.\n"}


# what is done to a folder, and what is said then
SPOILED = {
    "removed": (shutil.rmtree, "there is no folder '"),
    "unfinished": (lambda folder: folder.rename(folder.with_name(".out.incomplete")), "is an unfinished conversion."),
    "empty": (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
    "base": (
        lambda folder: (folder / "config.json").write_text('{"model_type": "llama"}'),
        "is a plain Llama, without hyper-connections",
    ),
    "code": (
        lambda folder: (folder / "hyper_connections.py").unlink(),
        "the code file hyper_connections.py is missing. Run `hf-hyperconn refresh`",
    ),
    "shard": (
        lambda folder: shards(folder)["hc"].unlink(),
        "which is missing. Copy or download the checkpoint again.",
    ),
    "damaged": (
        lambda folder: flip_last_byte(next(iter(shards(folder).values()))),
        "is not as the conversion wrote it",
    ),
    "unverified": (
        lambda folder: change_record(folder, verification=None),
        "has never been compared with its base (--verify",
    ),
    "card": (
        lambda folder: (folder / "README.md").write_text("---\nlicense: [mit\n---\n"),
        "README.md' can't be read: ",
    ),
    "link": (link_out, "LICENSE.txt' is a link to '"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_refused_before_the_hub_is_asked(case, hub, folder):
    spoil, message = SPOILED[case]
    spoiled = spoil(folder)
    with pytest.raises(HyperConnError) as error:
        push_checkpoint(spoiled if isinstance(spoiled, Path) else folder, "me/refused")
    assert message in str(error.value)
    assert hub.requests == []


@pytest.mark.parametrize("repo", ["model", "a/b/c", "me/not a name"])
def test_names_that_are_none(repo, hub, converted):
    with pytest.raises(PushError, match="repo must be owner/name"):
        push_checkpoint(converted, repo)
    assert writes(hub) == []


def test_a_comparison_with_the_base_is_recorded_where_it_was_missing(hub, folder, base, tmp_path, capsys):
    change_record(folder, verification=None)
    unverified = (folder / RECORD).read_bytes()
    torch.manual_seed(1)
    LlamaForCausalLM(llama_config()).save_pretrained(tmp_path / "other", max_shard_size="50KB")
    assert main(["verify", str(folder), "--against", str(tmp_path / "other"), "--mode", "structure"]) == 3
    assert main(["verify", str(folder)]) == 0
    assert (folder / RECORD).read_bytes() == unverified
    assert main(["push", str(folder), "me/verified"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.endswith(f"Run `hf-hyperconn verify '{folder}' --against 'org/base'`, then push.")

    assert main(["verify", str(folder), "--against", "org/base", "--mode", "structure"]) == 0
    assert "recorded      the comparison with the base" in capsys.readouterr().err
    verified = (folder / RECORD).read_bytes()
    report = verify_checkpoint(folder, str(base), mode="structure")
    assert json.loads(verified)["verification"] == json.loads(json.dumps(report.as_dict()))
    assert main(["verify", str(folder), "--against", str(base), "--mode", "structure"]) == 0
    assert (folder / RECORD).read_bytes() == verified
    assert main(["push", str(folder), "me/verified"]) == 0
    assert_holds(hub, "me/verified", folder)


def test_no_comparison_is_recorded_of_what_was_trained_since(folder, base):
    change_record(folder, verification=None)
    hc = shards(folder)["hc"]
    save_file({name: value + 0.1 for name, value in load_file(hc).items()}, hc, {"format": "pt"})
    before = (folder / RECORD).read_bytes()
    assert main(["verify", str(folder), "--against", str(base), "--mode", "structure"]) == 0
    assert (folder / RECORD).read_bytes() == before


def test_a_gated_base_does_not_become_public_by_oversight(hub, base, folder, tmp_path):
    with_terms = with_card(shutil.copytree(base, tmp_path / "with terms"), **TERMS)
    change_record(folder, base={"model": "org/gated", "commit": hub.push("org/gated", with_terms)})
    hub.gated.add("org/gated")
    (folder / "README.md").unlink(missing_ok=True)

    def refused(fields: str):
        with pytest.raises(PushError) as error:
            push_checkpoint(folder, "me/gated")
        assert str(error.value) == (
            f"the base 'org/gated' is gated, and 'me/gated' would be public. Give --private, or a README.md whose "
            f"metadata carries the base's terms over (missing or different: {fields}); `hf-hyperconn card` adds them."
        )
        assert writes(hub) == []

    refused("license, license_link, extra_gated_prompt")
    with_card(folder, license="mit", license_link="LICENSE")
    refused("license, extra_gated_prompt")
    with_card(folder, **TERMS)
    said = []
    push_checkpoint(folder, "me/gated", say=said.append)
    assert [line for line in said if line.startswith("gated base")] == [
        "gated base    a card doesn't gate a repo: switch gating on in the settings of 'me/gated'"
    ]
    assert_holds(hub, "me/gated", folder)


def test_the_card_of_a_trained_model_carries_the_terms_over(hub, base, folder, tmp_path):
    """Without the license's file beside the weights it links to the base's, which is the base's link all the same."""
    with_terms = with_card(shutil.copytree(base, tmp_path / "with terms"), **TERMS, license_details="not inherited")
    commit = hub.push("org/gated", with_terms)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "hc_base_model": "org/gated", "hc_base_commit": commit}))
    for name in (RECORD, "README.md", "LICENSE"):
        (folder / name).unlink()
    link = f"https://huggingface.co/org/gated/blob/{commit}/LICENSE"
    assert write_card(folder).metadata["license_link"] == link
    hub.gated.add("org/gated")
    push_checkpoint(folder, "me/trained")
    assert_holds(hub, "me/trained", folder)
    with_card(folder, **{**TERMS, "license_link": link.replace("org/gated", "org/other")})
    with pytest.raises(PushError, match=r"\(missing or different: license_link\)"):
        push_checkpoint(folder, "me/other")


def test_the_name_that_a_license_asks_for_is_the_repo_s(hub, folder):
    with_card(folder, license="llama3.2")
    said = []
    for name, private in (("me/Kuzco", True), ("me/Llama-Kuzco", False), ("me/Pacha", False)):
        push_checkpoint(folder, name, private=private, say=said.append)
    (line,) = [line for line in said if line.startswith("name  ")]
    assert (
        "requires that the name of a model made from it begin with 'Llama'; 'Pacha' does not. Give it such a" in line
    )


def test_the_base_itself_is_not_replaced(hub, base, converted):
    hub.tokens["hf_me"] += ("org",)
    with pytest.raises(PushError, match="'org/base' is the base, whose weights would be replaced. Give another repo"):
        push_checkpoint(converted, "org/base")
    assert writes(hub) == []
    push_checkpoint(converted, "org/base", revision="hc")
    assert (hub.folder("org/base") / "config.json").read_bytes() == (base / "config.json").read_bytes()


@pytest.mark.parametrize("state", ["gated", "private"])
def test_where_a_gated_base_may_go(state, hub, converted):
    """To a private repo, new or not, and to a gated one."""
    hub.gated.add("org/base")
    push_checkpoint(converted, "me/new", private=True)
    assert "me/new" in hub.private
    hub.begin("me/there", private=state == "private")
    getattr(hub, state).add("me/there")
    push_checkpoint(converted, "me/there")
    assert_holds(hub, "me/there", converted)


def test_a_base_that_is_out_of_sight_needs_a_license(hub, folder):
    hub.private.add("org/base")
    with pytest.raises(PushError, match=r"the base 'org/base' can't be read, .*\(missing or different: license\)"):
        push_checkpoint(folder, "me/hidden")
    hub.tokens["hf_me"] += ("org",)
    with pytest.raises(PushError, match=r"the base 'org/base' is private, .*\(missing or different: license\)"):
        push_checkpoint(folder, "me/hidden")
    assert writes(hub) == []
    push_checkpoint(with_card(folder, license="mit"), "me/hidden")
    assert_holds(hub, "me/hidden", folder)


def test_a_trained_model_remembers_its_base(hub, converted, tmp_path):
    """After training there is no record of the conversion; the config tells."""
    model = HCLlamaForCausalLM.from_pretrained(converted)
    with torch.no_grad():
        model.model.layers[0].attn_hc.static_beta.add_(0.1)
    model.save_pretrained(tmp_path / "trained")
    hub.gated.add("org/base")
    with pytest.raises(PushError, match=r"the base 'org/base' is gated, .*\(missing or different: license\)"):
        push_checkpoint(tmp_path / "trained", "me/trained")
    assert writes(hub) == []
    push_checkpoint(tmp_path / "trained", "me/trained", private=True)
    assert_holds(hub, "me/trained", tmp_path / "trained")


def test_private_is_not_promised_of_a_public_repo(hub, converted):
    hub.begin("me/public", private=False)
    with pytest.raises(PushError, match="'me/public' exists and is public. Drop --private"):
        push_checkpoint(converted, "me/public", private=True)
    assert writes(hub) == []


def let_someone_commit_meanwhile(hub):
    def commit(oid: str):
        hub.refs("me/refused")["main"] = hub.commit("me/refused", [], hub.refs("me/refused")["main"])

    hub.before_storing = commit


def fail_storing(hub):
    def fail(oid: str):
        raise HubError(507, None, "The disk is full.")

    hub.before_storing = fail


def close(hub):
    hub.shutdown()
    hub.server_close()


AGAIN = "Run the same command again. Files already uploaded stay there."
REFUSED = {
    "nobody": (
        lambda hub: None,
        "",
        "the Hub doesn't know who is writing to 'me/refused'. Log in with `hf auth login`, or set HF_TOKEN.",
    ),
    "guest": (
        lambda hub: None,
        "hf_guest",
        "the Hub refuses to write to 'me/refused' (You don't have the rights to write to me/refused). Log in with a "
        "token that may (`hf auth login`), open a pull request with --create-pr, or give another repo.",
    ),
    "full": (lambda hub: hub.full.add("me"), "hf_me", f"`{FULL} Fix that, and push again."),
    "meanwhile": (let_someone_commit_meanwhile, "hf_me", f"Please refresh and try again.). {AGAIN}"),
    "storing": (fail_storing, "hf_me", f"the Hub answered 507 (The disk is full.). Wait a little. {AGAIN}"),
    "closed": (close, "hf_me", f"the Hub can't be reached (ConnectError). Go online. {AGAIN}"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_refusal_says_what_to_do(case, hub, converted, tmp_path, capsys):
    refuse, token, message = REFUSED[case]
    refuse(hub)
    with connected(hub, tmp_path, token):
        assert main(["push", str(converted), "me/refused"]) == 1
    printed = capsys.readouterr()
    assert printed.out == ""
    *_, error = printed.err.splitlines()
    assert error.startswith("error: ")
    assert error.endswith(message)
    assert "Traceback" not in printed.err
    assert "(unexpected" not in error
    assert hub.committed == []


@pytest.mark.parametrize(
    ("number", "filename", "where"),
    [(errno.ENOENT, "model.safetensors", "'model.safetensors'"), (errno.ENOSPC, None, "a file of this machine")],
)
def test_a_fault_of_this_machine_is_not_the_hub_s(number, filename, where):
    """A weight file that is removed during the upload, a cache of the uploads that is full."""
    error = OSError(number, os.strerror(number), filename)
    sent_in_a_thread = RuntimeError("Error while uploading")
    sent_in_a_thread.__cause__ = error
    for raised in (error, sent_in_a_thread):
        with pytest.raises(PushError) as caught, explain_hub_errors("me/refused"):
            raise raised
        assert str(caught.value) == f"{where} can't be read or written: {os.strerror(number)}. Fix that. {AGAIN}"


def test_offline(hub, converted, monkeypatch, capsys):
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert main(["push", str(converted), "me/offline"]) == 1
    assert capsys.readouterr().err.splitlines()[-1] == (
        f"error: the Hub can't be reached (OfflineModeIsEnabled). Go online. {AGAIN}"
    )


def test_a_card_that_the_hub_does_not_take(hub, folder, capsys):
    with_card(folder, license={"name": "mit"})
    assert main(["push", str(folder), "me/card"]) == 1
    assert 'Invalid metadata in README.md. - "license" must be a string' in capsys.readouterr().err
    assert hub.committed == []
