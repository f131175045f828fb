"""Pushed repos in processes that can't import hf_hyperconn, and a push that was killed."""

import json
import os
import subprocess
import sys
import time
from itertools import count
from threading import Event

import pytest
from transformers import LlamaForCausalLM

from hf_hyperconn import HCLlamaForCausalLM
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.push import push_checkpoint
from tests.hub import HubError, sha256
from tests.pages import REPOSITORY
from tests.processes import without_package

from .conftest import assert_holds, shards

LOAD = """
import json, sys
from pathlib import Path
import torch, transformers
from huggingface_hub import snapshot_download

try:
    import hf_hyperconn
except ImportError:
    pass
else:
    raise SystemExit("hf_hyperconn can be imported")
ids = torch.arange(48).reshape(2, 24)
facts = {}
for repo, folder in json.loads(sys.argv[1]).items():
    snapshot = Path(snapshot_download(repo))
    names = {file.relative_to(folder).as_posix() for file in Path(folder).rglob("*") if file.is_file()}
    logits = {}
    for place in (repo, folder):
        model = transformers.AutoModelForCausalLM.from_pretrained(place, trust_remote_code=True)
        with torch.no_grad():
            logits[place] = model(ids).logits
    facts[repo] = {
        "class": type(model).__module__.partition(".")[0],
        "streams": model.config.hc_mult,
        "equal": torch.equal(logits[repo], logits[folder]),
        "differing": [n for n in names if (snapshot / n).read_bytes() != (Path(folder) / n).read_bytes()],
        "files": len(names),
    }
print(json.dumps(facts))
"""
PATIENCE = 60


def environment(hub, place) -> dict[str, str]:
    """What makes a process take the stand-in for the Hub."""
    place.mkdir(parents=True, exist_ok=True)
    return {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(place / "home"),
        "HF_HUB_OFFLINE": "0",
        "HF_HUB_DISABLE_XET": "1",
        "no_proxy": "127.0.0.1",
    }


@pytest.mark.slow
def test_pushed_repos_load_elsewhere(hub, base, converted, tmp_path):
    push_checkpoint(converted, "me/pushed")
    base_shards = {sha256(file) for name, file in shards(converted).items() if name != "hc"}
    assert [oid for _, oid, _ in hub.uploaded] == [sha256(shards(converted)["hc"])]
    model = HCLlamaForCausalLM.from_prenorm(base, hc_mult=3)
    model.push_to_hub("me/model")
    model.save_pretrained(tmp_path / "saved")
    assert base_shards.isdisjoint(oid for _, oid, _ in hub.uploaded)

    jobs = {"me/pushed": str(converted), "me/model": str(tmp_path / "saved")}
    clean = {**without_package(tmp_path / "clean"), **environment(hub, tmp_path / "clean")}
    command = [sys.executable, "-c", LOAD, json.dumps(jobs)]
    done = subprocess.run(command, capture_output=True, text=True, env=clean, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout.splitlines()[-1])
    # the card that goes up names the repo
    for repo, streams, differing in (("me/pushed", 2, ["README.md"]), ("me/model", 3, [])):
        assert facts[repo].pop("files") > 15
        expected = {"class": "transformers_modules", "streams": streams, "equal": True, "differing": differing}
        assert facts[repo] == expected


@pytest.mark.slow
def test_a_killed_push_goes_on_where_it_stopped(hub, base, tmp_path):
    """Its base is a folder, so all its shards are sent; two are stored when it is killed."""
    LlamaForCausalLM.from_pretrained(base).save_pretrained(tmp_path / "base", max_shard_size="50KB")
    folder = convert_checkpoint(str(tmp_path / "base"), tmp_path / "folder", verify="structure").path
    arrived, stuck, killed = count(1), Event(), Event()

    def keep_two(oid: str):
        if next(arrived) > 2:
            stuck.set()
            killed.wait(PATIENCE)
            raise HubError(500, None, "cut off")

    hub.before_storing = keep_two
    process = subprocess.Popen(
        [sys.executable, "-m", "hf_hyperconn.conversion", "push", str(folder), "me/killed"],
        env={**os.environ, **environment(hub, tmp_path / "home"), "PYTHONPATH": str(REPOSITORY)},
        cwd=tmp_path,
    )
    try:
        assert stuck.wait(PATIENCE)
        deadline = time.monotonic() + PATIENCE
        while len(hub.uploaded) < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    finally:
        process.kill()
        process.wait()
        killed.set()
    assert hub.committed == []
    first = [oid for _, oid, _ in hub.uploaded]
    assert len(first) == 2

    hub.before_storing = lambda oid: None
    push_checkpoint(folder, "me/killed")
    sent = [oid for _, oid, _ in hub.uploaded]
    assert sorted(sent) == sorted(sha256(file) for file in shards(folder).values()), "once each"
    assert_holds(hub, "me/killed", folder)
