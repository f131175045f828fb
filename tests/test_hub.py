"""Conversion, verification, inspection and loading from the Hub, and its refusals, against a stand-in on loopback."""

import json
import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import hf_hyperconn
from hf_hyperconn import HCLlamaForCausalLM
from hf_hyperconn.conversion.checkpoint.source import RECORD
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.inspection import inspect_checkpoint
from tests.conftest import llama_config
from tests.hub import Hub

PACKAGE = Path(hf_hyperconn.__file__).parents[1]
FIRST_REQUEST = 100_001  # bytes of a safetensors file that huggingface_hub asks for to read its header
LEFT_BEHIND = {"pytorch_model.bin", "original/params.json", "original/consolidated.00.pth"}
COPIED = {"LICENSE", "chat_template.jinja", "generation_config.json"}
READ = "README.md"  # for the metadata of its conversion's card
HC_SHARD = "model-00002-of-00002.safetensors"

BATCH = """
import contextlib, io, json, sys
from hf_hyperconn.conversion.cli import main

results = {}
for name, arguments in json.loads(sys.argv[1]).items():
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = main(arguments)
    results[name] = code, out.getvalue(), err.getvalue()
print(json.dumps(results))
"""

LOAD = """
import json, sys, torch
from hf_hyperconn import HCLlamaForCausalLM
from huggingface_hub import snapshot_download
from transformers import LlamaForCausalLM

snapshot_download("org/snapshot")
loaded = HCLlamaForCausalLM.from_prenorm("org/loaded", hc_mult=4)
base = LlamaForCausalLM.from_pretrained(sys.argv[1])
ids = torch.arange(48).reshape(2, 24)
with torch.no_grad():
    equal = torch.equal(loaded(ids).logits, base(ids).logits)
print(json.dumps({"class": type(loaded).__name__, "hc_mult": loaded.config.hc_mult, "equal": equal}))
"""


class Result(NamedTuple):
    code: int
    out: str
    err: str


def run(folder: Path, *arguments: str, endpoint: str, offline: bool = False, home: str = "home") -> Result:
    """Run Python in `folder`, with the stand-in for the Hub and a cache of its own."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    env |= {
        "HF_ENDPOINT": endpoint,
        "HF_HOME": str(folder / home),
        "HF_HUB_OFFLINE": str(int(offline)),
        "HF_HUB_DISABLE_XET": "1",
        "no_proxy": "127.0.0.1",
        "PYTHONPATH": os.pathsep.join(filter(None, [str(PACKAGE), os.environ.get("PYTHONPATH")])),
    }
    process = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=env, capture_output=True, text=True, timeout=300
    )
    return Result(process.returncode, process.stdout, process.stderr)


def run_batch(folder: Path, commands: dict[str, list[str]], **options) -> dict[str, Result]:
    """Run several command lines in one process."""
    process = run(folder, "-c", BATCH, json.dumps(commands), **options)
    assert process.code == 0, process.err
    return {name: Result(*result) for name, result in json.loads(process.out.splitlines()[-1]).items()}


@pytest.fixture(scope="module")
def bases(tmp_path_factory) -> dict[str, Path]:
    """A tiny Llama as one file and as shards, and an older one, each with more files around it."""
    config = llama_config(vocab_size=64, intermediate_size=96, num_hidden_layers=2, initializer_range=0.2)
    folders = {}
    for seed, (name, shard_size) in enumerate({"older": "1GB", "tiny": "1GB", "sharded": "50KB"}.items()):
        folders[name] = folder = tmp_path_factory.mktemp("bases") / name
        torch.manual_seed(seed)
        LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=shard_size)
        for file in sorted({*LEFT_BEHIND, "LICENSE", "chat_template.jinja"}):
            (folder / file).parent.mkdir(exist_ok=True)
            (folder / file).write_text(f"{file} of {name}")
        (folder / READ).write_text(f"---\nlicense: apache-2.0\n---\n{READ} of {name}")
    assert (folders["tiny"] / "model.safetensors").stat().st_size > FIRST_REQUEST
    return folders


@pytest.fixture(scope="module")
def commits() -> dict[str, str]:
    """The newest commit of each repo, and `v1` of org/tiny; the `hub` fills it."""
    return {}


@pytest.fixture(scope="module")
def hub(bases, commits):
    with Hub() as hub:
        commits["v1"] = hub.push("org/tiny", bases["older"], "v1")
        for name in ("tiny", "dry", "gated", "loaded", "snapshot"):
            commits[name] = hub.push(f"org/{name}", bases["tiny"])
        commits["sharded"] = hub.push("org/sharded", bases["sharded"])
        hub.gated.add("org/gated")
        yield hub


@pytest.fixture(scope="module")
def work(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("work")
    (folder / "dry").mkdir()
    (folder / "refused").mkdir()
    return folder


@pytest.fixture(scope="module")
def converted(hub, work) -> Result:
    arguments = ["convert", "org/tiny", "tiny-hc", "-n", "2", "--verify", "structure"]
    return run(work, "-m", "hf_hyperconn.conversion", *arguments, endpoint=hub.url)


@pytest.fixture(scope="module")
def conversions(hub, work, bases) -> list[str]:
    """Names of repos with conversions whose connections are larger than the first request for a header."""
    fresh = convert_checkpoint(str(bases["tiny"]), work / "fresh", hc_mult=8, connection="mhc", verify="off").path
    assert (fresh / HC_SHARD).stat().st_size > FIRST_REQUEST
    copies = {name: shutil.copytree(fresh, work / name) for name in ("trained", "unrecorded", "resaved")}
    values = load_file(fresh / HC_SHARD)
    save_file({name: value + 0.5 for name, value in values.items()}, copies["trained"] / HC_SHARD)
    record = json.loads((fresh / RECORD).read_text())
    del record["hyper_connection_sha256"]
    (copies["unrecorded"] / RECORD).write_text(json.dumps(record))
    (copies["resaved"] / HC_SHARD).unlink()
    HCLlamaForCausalLM.from_pretrained(fresh).save_pretrained(copies["resaved"])
    for name, folder in {"fresh": fresh, **copies}.items():
        hub.push(f"org/{name}", folder)
    liar = shutil.copytree(fresh, work / "liar")
    header = json.dumps({"x": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4]}}).encode()
    (liar / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    hub.push("org/liar", liar)
    return ["fresh", *copies]


@pytest.fixture(scope="module")
def online(hub, work, converted, conversions) -> dict[str, Result]:
    structure = ["--verify", "structure"]
    commands = {
        "sharded": ["convert", "org/sharded", "sharded-hc", *structure],
        "v1": ["convert", "org/tiny", "v1-hc", "--revision", "v1", *structure],
        "dry run": ["convert", "org/dry", "dry/out", "--dry-run"],
        "verify": ["verify", "tiny-hc", "--against", "org/tiny", "--mode", "structure"],
        "verify v1": ["verify", "tiny-hc", "--against", "org/tiny", "--revision", "v1", "--mode", "structure"],
        "unknown revision": ["convert", "org/tiny", "refused/out", "--revision", "v2"],
        "unknown repo": ["convert", "org/nothing", "refused/out"],
        "unknown name": ["convert", "nothing", "refused/out"],
        "gated": ["convert", "org/gated", "refused/out"],
        **{f"inspect {name}": ["inspect", f"org/{name}", "--json"] for name in conversions},
        "inspect for people": ["inspect", "org/fresh"],
        "inspect plain": ["inspect", "org/dry"],
        "inspect liar": ["inspect", "org/liar"],
        "inspect unknown revision": ["inspect", "org/fresh", "--revision", "v2"],
    }
    return run_batch(work, commands, endpoint=hub.url)


@pytest.fixture(scope="module")
def loaded(hub, work, bases) -> Result:
    return run(work, "-c", LOAD, str(bases["tiny"]), endpoint=hub.url)


@pytest.fixture(scope="module")
def offline(hub, work, online, loaded) -> dict[str, Result]:
    """Conversions offline, from a cache that `online` and `loaded` have filled, and of a repo that it lacks."""
    commands = {
        name: ["convert", f"org/{name}", f"offline-{name}", "--verify", "structure"]
        for name in ("tiny", "snapshot", "loaded")
    }
    commands["v1"] = ["convert", "org/tiny", "offline-v1", "--revision", "v1", "--verify", "structure"]
    commands["not cached"] = ["convert", "org/nothing", "refused/out"]
    before = len(hub.requests)
    results = run_batch(work, commands, endpoint=hub.url, offline=True)
    assert len(hub.requests) == before
    return results


def assert_refused(result: Result, message: str, work: Path):
    assert result.err.splitlines()[-1] == f"error: {message}"  # torchao prints when it is imported
    assert "Traceback" not in result.err
    assert (result.code, result.out) == (1, "")
    assert list((work / "refused").iterdir()) == []


def assert_converted(out: Path, base: Path, repo: str, commit: str):
    record = json.loads((out / "hyperconn_conversion.json").read_text())
    assert record["base"] == {"model": repo, "commit": commit}
    assert record["base_shards"]
    for shard in record["base_shards"]:
        assert (out / shard["file"]).read_bytes() == (base / shard["source"]).read_bytes()
    assert {shard["source"] for shard in record["base_shards"]} == {file.name for file in base.glob("*.safetensors")}


def test_convert(converted, work, bases, commits):
    assert converted.code == 0, converted.err
    assert converted.out == "tiny-hc\n"
    assert "Traceback" not in converted.err
    assert_converted(work / "tiny-hc", bases["tiny"], "org/tiny", commits["tiny"])
    assert json.loads((work / "tiny-hc" / "config.json").read_text())["hc_mult"] == 2


@pytest.mark.slow
def test_convert_sharded(online, work, bases, commits):
    assert online["sharded"].code == 0, online["sharded"].err
    assert len(list(bases["sharded"].glob("*.safetensors"))) > 2
    assert_converted(work / "sharded-hc", bases["sharded"], "org/sharded", commits["sharded"])


def test_only_what_is_copied_is_downloaded(online, hub, work, bases):
    assert hub.files_requested("org/tiny") == {"config.json", "model.safetensors", READ, *COPIED}
    for out, base in (("tiny-hc", "tiny"), ("sharded-hc", "sharded")):
        files = {file.relative_to(work / out).as_posix() for file in (work / out).rglob("*") if file.is_file()}
        assert files >= COPIED
        assert not files & LEFT_BEHIND
        assert not hub.files_requested(f"org/{base}") & LEFT_BEHIND
        card = (work / out / READ).read_text()
        assert f"base_model: org/{base}\n" in card
        assert "license: apache-2.0\n" in card
        assert f"{READ} of {base}" not in card
        for file in COPIED:
            assert (work / out / file).read_bytes() == (bases[base] / file).read_bytes()


def test_dry_run_downloads_no_weights_and_writes_nothing(online, hub, work, commits):
    result = online["dry run"]
    assert (result.code, result.err) == (0, "")
    assert result.out.startswith(f"Plan: org/dry@{commits['dry'][:7]} (llama, 2 layers, hidden 32, F32)")
    configs = {name for name in COPIED if name.endswith("config.json")}  # which may name code of their own
    assert hub.files_requested("org/dry") == {"config.json", "model.safetensors", *configs}
    assert hub.sent("org/dry", "model.safetensors") == FIRST_REQUEST
    assert list((work / "dry").iterdir()) == []


def test_revision(online, work, bases, commits):
    assert online["v1"].code == 0, online["v1"].err
    assert commits["v1"] != commits["tiny"]
    assert_converted(work / "v1-hc", bases["older"], "org/tiny", commits["v1"])


def test_verify_against_the_hub(online):
    assert online["verify"].code == 0, online["verify"].err
    assert "base tensors  the same bytes as the base's" in online["verify"].out
    assert online["verify v1"].code == 3
    assert "tensors differ from the base's" in online["verify v1"].err


NOWHERE = "and no such repo on the Hub. Check the name; if it is private, log in with `hf auth login`."
UNREACHABLE = "is not a local folder, and the Hub can't be reached for it ({}). Go online, or give a local folder."
REFUSALS = {
    "unknown revision": "'org/tiny' has no revision 'v2'. Check --revision.",
    "unknown repo": f"there is no folder 'org/nothing' {NOWHERE}",
    "unknown name": f"there is no folder 'nothing' {NOWHERE}",
    "gated": "access to 'org/gated' is gated. Ask for it on the model's page, then log in with `hf auth login`.",
    "inspect unknown revision": "'org/fresh' has no revision 'v2'. Check --revision.",
    "inspect plain": "'org/dry' is a plain Llama, without hyper-connections. Convert it: hf-hyperconn convert org/dry",
    "inspect liar": (
        "model.safetensors of 'org/liar' is not a safetensors file (a tensor of 4000000000000 bytes lies from 0 to 4, "
        "after 0). Do not trust this checkpoint."
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name, online, work):
    assert_refused(online[name], REFUSALS[name], work)


def test_unreachable_hub(work):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    arguments = ["-m", "hf_hyperconn.conversion", "convert", "org/tiny", "refused/out"]
    result = run(work, *arguments, endpoint=f"http://127.0.0.1:{port}", home="empty-home")
    assert_refused(result, f"'org/tiny' {UNREACHABLE.format('ConnectError')}", work)


def test_offline_without_the_repo(offline, work):
    assert_refused(offline["not cached"], f"'org/nothing' {UNREACHABLE.format('OfflineModeIsEnabled')}", work)


@pytest.mark.parametrize(
    ("name", "base", "repo"),
    [
        pytest.param("snapshot", "tiny", "org/snapshot", id="downloaded"),
        pytest.param("loaded", "tiny", "org/loaded", id="loaded"),
        pytest.param("tiny", "tiny", "org/tiny", id="converted"),
        pytest.param("v1", "older", "org/tiny", id="converted-revision"),
    ],
)
def test_offline_from_the_cache(offline, work, bases, commits, name, base, repo):
    assert offline[name].code == 0, offline[name].err
    assert_converted(work / f"offline-{name}", bases[base], repo, commits[name])


def test_from_prenorm(loaded, hub, bases):
    assert loaded.code == 0, loaded.err
    assert json.loads(loaded.out.splitlines()[-1]) == {"class": "HCLlamaForCausalLM", "hc_mult": 4, "equal": True}
    assert hub.sent("org/loaded", "model.safetensors") == (bases["tiny"] / "model.safetensors").stat().st_size


def test_inspect_takes_no_weights(online, hub, work):
    shards = {"model-00001-of-00002.safetensors", HC_SHARD}
    code = {path.name for path in (work / "fresh").glob("*.py")}
    assert hub.files_requested("org/fresh") == {"config.json", RECORD, "model.safetensors.index.json", *code, *shards}
    assert {hub.sent("org/fresh", shard) for shard in shards} == {2 * FIRST_REQUEST}  # of two commands
    here = inspect_checkpoint(str(work / "fresh")).as_dict()
    by_hub = json.loads(online["inspect fresh"].out)
    differing = {name for name, value in json.loads(json.dumps(here)).items() if by_hub[name] != value}
    assert differing == {"name", "drift"}


@pytest.mark.parametrize(
    ("name", "trained"), [("fresh", False), ("trained", True), ("unrecorded", None), ("resaved", None)]
)
def test_inspect_knows_by_the_digest(online, name, trained):
    """The record of what was saved over a conversion is of another file, so nothing is concluded from it."""
    facts = json.loads(online[f"inspect {name}"].out)
    assert (facts["trained"], facts["drift"]) == (trained, None)
    assert (facts["not_known"] is None) == (trained is not None)


def test_inspect_for_people(online):
    assert (online["inspect for people"].code, online["inspect for people"].err) == (0, "")
    assert "the hyper-connections are at the equivalent initialization" in online["inspect for people"].out
