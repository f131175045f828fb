"""The wheel and the sdist, as a user gets them."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

import hf_hyperconn
from hf_hyperconn.conversion.demo import byte_tokenizer

from .conftest import llama_config
from .followed import NOT_SOURCE
from .marks import tail
from .pages import REPOSITORY, snippets

MODEL = "meta-llama/Llama-3.2-1B"

pytestmark = pytest.mark.slow


def run(*command, **keywords) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **keywords)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """sdist, and the wheel built from it, as `make dist` makes them in a clone."""
    clone = tmp_path_factory.mktemp("dist") / "clone"
    shutil.copytree(REPOSITORY, clone, ignore=shutil.ignore_patterns(*NOT_SOURCE))
    run("make", "dist", f"BIN={Path(sys.executable).parent}", "INSTALLED=", cwd=clone)
    return clone / "dist"


def test_contents(dist):
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = REPOSITORY / "hf_hyperconn"
    code = [path for pattern in ("*.py", "py.typed") for path in package.rglob(pattern)]
    expected = {path.relative_to(REPOSITORY).as_posix() for path in code} | {"hf_hyperconn/__init__.pyi"}
    expected |= {f"hf_hyperconn/{path.relative_to(REPOSITORY)}" for path in REPOSITORY.glob("conversion/**/*.py")}
    expected |= {f"hf_hyperconn/model_cards/{name}" for name in ("__init__.py", "template.md")}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)
    with tarfile.open(sdist) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "conversion/convert.py", "hf_hyperconn/__init__.pyi"} <= members
    assert not any(name.startswith("tests/") for name in members)  # some without what they import


def test_the_description_leads_to_pages_of_this_release(dist):
    """PyPI resolves no relative link."""
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        _, _, description = archive.read(name).decode().partition("\n\n")
    assert description.startswith("# hf_hyperconn")
    targets = re.findall(r"\]\(([^)]+)\)", description)
    ours = [target for target in targets if target.startswith("https://github.com/hf-hyperconn/hf_hyperconn/")]
    assert all(target.startswith("https://") for target in targets)
    for target in ours:
        kind, tag, path = target.removeprefix("https://github.com/hf-hyperconn/hf_hyperconn/").split("/", 2)
        assert (kind, tag) == ("raw" if path.endswith(".svg") else "blob", f"v{hf_hyperconn.__version__}")
        assert (REPOSITORY / path.partition("#")[0]).exists()
    assert len(ours) > 20


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    """A tiny Llama with a tokenizer, where the README's commands look for theirs."""
    folder = tmp_path_factory.mktemp("bases") / MODEL
    LlamaForCausalLM(llama_config(vocab_size=256, initializer_range=0.2)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("pattern", [*tail("*.whl"), "*.tar.gz"])
def test_it_runs_the_readme_in_a_clean_environment(dist, base, pattern, tmp_path):
    """With this environment's torch and transformers, but without its checkout or editable install."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    (package,) = dist.glob(pattern)
    run(python, "-m", "pip", "install", "--no-deps", package)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    variables["PATH"] = f"{python.parent}{os.pathsep}{os.environ['PATH']}"
    place = {"cwd": tmp_path, "env": variables}
    shutil.copytree(base, tmp_path / MODEL)

    location = run(python, "-c", "import hf_hyperconn.conversion.convert as c; print(c.__file__)", **place)
    assert Path(location.strip()).is_relative_to(site)
    code = dict(reversed(snippets("README.md")))  # the first of each language
    printed = [run(*shlex.split(line), **place) for line in code["bash"].splitlines()]
    assert printed[1] == "Llama-3.2-1B-HCx4\n"
    assert "bit for bit" in printed[2]
    assert run(python, "-c", code["python"], **place).startswith("Hyper-Connections are")
    assert run("hf-hyperconn", "card", "Llama-3.2-1B-HCx4", **place) == "Llama-3.2-1B-HCx4/README.md\n"
    card = (tmp_path / "Llama-3.2-1B-HCx4" / "README.md").read_text(encoding="utf-8")
    assert "It equals its base until it is trained" in card
