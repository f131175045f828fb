"""The files that go up, the files that stay, and the dry run that names them."""

import ast
import json
import pickle
from glob import glob
from pathlib import Path

import pytest
import transformers
from huggingface_hub import CommitOperationAdd

from hf_hyperconn.conversion.card import write_card
from hf_hyperconn.conversion.checkpoint.readme import README, with_repo_name
from hf_hyperconn.conversion.checkpoint.repository_files import belongs, may_be_added
from hf_hyperconn.conversion.checkpoint.source import LocalSource
from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.push import plan_push, push_checkpoint
from hf_hyperconn.conversion.push.folder import _included
from hf_hyperconn.errors import PushError, UnsupportedCheckpointError
from tests.hub import files_in, sha256

from .conftest import assert_holds, put_beside, shards, writes

PRIVATE = (
    *("random_states_0.pkl", "optimizer.pkl", "scheduler.pickle", "pipeline.joblib", "PYTORCH_MODEL.BIN"),
    *("pytorch_model.bin", "optimizer.pt", "rng_state.pth", "training_args.bin", "trainer_state.json"),
    *("last/checkpoint-5/rng_state.pkl", "last/checkpoint-5/trainer_state.json", "last/tokenizer.json"),
    *("events.out.tfevents.1700000000.host.1.0", "logs/events.out.tfevents.1700000000.host.1.0"),
    *("id_rsa", "token.txt", ".env", ".netrc", "credentials.json", "notes.md", "data.jsonl", "helper.py"),
    *("LICENSE.pkl", "figures/x.pkl", "figures/raw/x.png", "vocab.pkl", "MODEL.SAFETENSORS"),
)
OF_A_MODEL = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.model", "qwen.tiktoken"),
    *("chat_template.jinja", "additional_chat_templates/tools.jinja", "generation_config.json", "tekken.json"),
    *("LICENSE", "LICENSE.txt", "licence.md", "LICENSE-2.0.txt", "USE_POLICY.md", "Notice", "NOTICE.txt", "COPYING"),
    *("figures/similarity.png", "figures/connections.svg", ".eval_results/lm_eval.yaml", "preprocessor_config.json"),
)


def test_a_model_goes_up_and_what_lies_beside_it_stays(hub, folder, capsys):
    before = files_in(folder).keys()
    for name in (*PRIVATE, *OF_A_MODEL):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"{}" if name == "generation_config.json" else pickle.dumps("mine"))
    result = push_checkpoint(folder, "me/files", accept_changes=True)
    assert_holds(hub, "me/files", folder, before | set(OF_A_MODEL))
    assert set(result.left) == set(PRIVATE)


def test_every_tokenizer_of_transformers_is_known():
    """Read from its source, as many can't be imported without further packages."""
    folder, names = Path(transformers.__file__).parent, set()
    for path in (*folder.glob("tokenization*.py"), *folder.glob("models/*/tokenization*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            targets = [ast.unparse(target) for target in node.targets] if isinstance(node, ast.Assign) else []
            if {"VOCAB_FILES_NAMES", "vocab_files_names"} & set(targets) and isinstance(node.value, ast.Dict):
                names |= {value.value for value in node.value.values if isinstance(value, ast.Constant)}
    assert len(names) > 20
    assert [name for name in names if not belongs(name)] == []


def test_a_dry_run_names_every_file_and_writes_nothing(hub, folder, capsys):
    """Also where there is no repo yet; what is planned is what is done."""
    put_beside(folder, "notes.md", "optimizer.pkl", *(f"more-{number}.bin" for number in range(9)))
    assert main(["push", str(folder), "me/dry", "--dry-run", "--json", "-q"]) == 0
    planned = json.loads(capsys.readouterr().out)
    assert (planned["repo"], planned["new_repo"]) == ("me/dry", True)
    assert writes(hub) == []
    assert not hub.exists("me/dry")
    sizes = {name: file.stat().st_size for name, file in files_in(folder).items()}
    sizes[README] = len(with_repo_name((folder / README).read_text(), "me/dry").encode())
    assert {file["name"]: file["size"] for file in planned["files"]} == sizes

    assert main(["push", str(folder), "me/dry", "--dry-run"]) == 0
    printed = capsys.readouterr()
    head, *table = printed.out.splitlines()
    assert head.startswith("Plan: me/dry (a new repo), ")
    assert {row.split()[-1] for row in table} == sizes.keys()
    assert "left here     more-0.bin, more-1.bin, more-2.bin and 8 more (" in printed.err

    result = push_checkpoint(folder, "me/dry")
    by_fate = {fate: {f["name"] for f in planned["files"] if f["fate"] == fate} for fate in ("uploaded", "copied")}
    assert by_fate == {"uploaded": result.uploaded.keys(), "copied": set(result.copied)}
    done = len(writes(hub))
    (folder / "README.md").write_text("# Mine\n")
    (hub.folder("me/dry") / "model.safetensors").write_bytes(b"other weights")
    again = {file.name: file.fate for file in plan_push(folder, "me/dry", revision="new").files}
    assert again.pop("model.safetensors") == "removed"
    assert {name for name, fate in again.items() if fate == "uploaded"} == {"README.md"}
    assert set(again.values()) == {"uploaded", "unchanged", "left"}
    assert len(writes(hub)) == done
    assert hub.refs("me/dry").keys() == {"main"}


def test_what_is_included_goes_up_besides(hub, folder):
    put_beside(folder, "notes/a.md", "notes/b.txt", "notes/deep/c.md", ".env", "optimizer.pkl", "helper.py")
    result = push_checkpoint(folder, "me/included", include=["notes/*.md", "helper.py"])
    assert set(result.left) == {"notes/b.txt", "notes/deep/c.md", ".env", "optimizer.pkl"}
    result = push_checkpoint(folder, "me/included", include=["**/*.md", "*"])
    assert result.left == (".env", "notes/b.txt")
    assert_holds(hub, "me/included", folder, files_in(folder).keys() - set(result.left))


@pytest.mark.parametrize(
    ("pattern", "meant"),
    [
        ("*/*.txt", {"notes/a.txt"}),
        ("notes/notes/*", {"notes/notes/b.txt"}),
        ("**/**/*.txt", {"notes/a.txt", "notes/notes/b.txt", "c.txt"}),
        ("notes/**", {"notes/a.txt", "notes/notes/b.txt"}),
        ("./n*/?.txt", {"notes/a.txt"}),
    ],
)
def test_patterns_mean_what_those_of_glob_mean(pattern, meant, tmp_path):
    put_beside(tmp_path, "notes/a.txt", "notes/notes/b.txt", "c.txt", "notes/.d.txt", ".hidden/e.txt")
    assert _included(LocalSource(tmp_path), [pattern]) == meant
    assert {Path(path).as_posix() for path in glob(pattern, root_dir=tmp_path, recursive=True)} >= meant


@pytest.mark.parametrize(
    "pattern", ["nothing", "*.zip", "../secret", "/etc/passwd", "", "MODEL.*", ".git/config", "notes"]
)
def test_what_can_not_be_included(pattern, hub, folder):
    put_beside(folder.parent, "secret")
    put_beside(folder, "MODEL.SAFETENSORS", ".git/config", "notes/a.md")
    with pytest.raises(PushError, match="names no file of '.*' that can be added. Give a path or a pattern"):
        push_checkpoint(folder, "me/included", include=[pattern])
    assert hub.requests == []


def test_links_to_folders_are_not_followed(hub, folder):
    """Not even into the folder itself, of which two would make a million paths."""
    put_beside(folder, "notes/a.md")
    for name, target in (("x", "."), ("y", "."), ("root", "/")):
        (folder / "notes" / name).symlink_to(target)
    push_checkpoint(folder, "me/linked", include=["notes/**"])
    assert (hub.folder("me/linked") / "notes" / "a.md").read_text() == "mine"
    with pytest.raises(PushError, match="names no file"):
        push_checkpoint(folder, "me/linked", include=["notes/x/*.md"])


def test_a_link_is_not_included(hub, folder):
    (folder.parent / "id_rsa").write_text("mine")
    (folder / "notes.txt").symlink_to(folder.parent / "id_rsa")
    push_checkpoint(folder, "me/linked")
    assert not (hub.folder("me/linked") / "notes.txt").exists()
    with pytest.raises(UnsupportedCheckpointError, match="notes.txt' is a link to '.*id_rsa', outside the folder"):
        push_checkpoint(folder, "me/linked", include=["notes.txt"])


def test_no_name_is_both_of_a_model_and_kept_from_the_hub():
    assert [name for name in OF_A_MODEL if not belongs(name)] == []
    assert [name for name in PRIVATE if belongs(name)] == []
    assert not any(map(may_be_added, ("Model.Safetensors.Index.json", "adapter_config.json", "a/.git/config")))
    assert all(map(may_be_added, PRIVATE[:-1]))
    assert belongs("README.md")


def test_names_are_printed_without_terminal_escapes(hub, folder, capsys):
    (folder / "a\x1b[2Jb\n.txt").write_text("mine")
    assert main(["push", str(folder), "me/escapes", "--dry-run"]) == 0
    printed = capsys.readouterr()
    assert "\x1b" not in printed.out + printed.err
    assert r"'a\x1b[2Jb\n.txt'" in printed.out


@pytest.mark.parametrize("name", ["config.json", "shard"])
def test_what_is_uploaded_is_what_was_checked(name, hub, folder, monkeypatch):
    """A small file goes up as it was read; weights that change meanwhile are refused."""
    hub.remove("org/base")  # so that its shards are uploaded, too
    victim = next(iter(shards(folder).values())) if name == "shard" else folder / name
    before = sha256(victim)
    create = CommitOperationAdd.__post_init__

    def meddle(self):
        if self.path_in_repo == victim.name:
            content = bytearray(victim.read_bytes())
            content[-2] ^= 1
            victim.write_bytes(content)
        create(self)

    monkeypatch.setattr(CommitOperationAdd, "__post_init__", meddle)
    if name == "shard":
        with pytest.raises(PushError, match=f"{victim.name} of '.*' was changed while it was being pushed. Push it"):
            push_checkpoint(folder, "me/raced", private=True)
        assert hub.committed == []
    else:
        push_checkpoint(folder, "me/raced", private=True)
        assert sha256(hub.folder("me/raced") / name) == before != sha256(victim)


def test_what_the_commands_write_goes_up_unasked(hub, base, folder, capsys):
    """A card with results, a verification that adds its report, and figures change nothing that was recorded."""
    from hf_hyperconn.conversion.plot import draw

    draw(str(folder), "connections", text=None, against=None, out=None)
    write_card(folder, update=True)
    assert main(["verify", str(folder), "--against", str(base), "--mode", "structure"]) == 0
    result = push_checkpoint(folder, "me/all")
    assert any(name.startswith("figures/") for name in result.uploaded)
    assert result.left == ()
    assert_holds(hub, "me/all", folder)
