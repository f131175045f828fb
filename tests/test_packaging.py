"""The wheel and the sdist, as a user gets them."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
import torch

REPOSITORY = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.slow


def run(*command, **keywords) -> str:
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, **keywords)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def dist(tmp_path_factory) -> Path:
    """sdist, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, REPOSITORY)
    return folder


def test_contents(dist):
    (wheel,), (sdist,) = dist.glob("*.whl"), dist.glob("*.tar.gz")
    names = set(zipfile.ZipFile(wheel).namelist())
    package = REPOSITORY / "hf_hyperconn"
    code = [path for pattern in ("*.py", "*.pyi", "py.typed") for path in package.rglob(pattern)]
    expected = {path.relative_to(REPOSITORY).as_posix() for path in code}
    expected |= {f"hf_hyperconn/conversion/{path.name}" for path in (REPOSITORY / "conversion").glob("*.py")}
    expected |= {f"hf_hyperconn/model_cards/{name}" for name in ("__init__.py", "template.md")}
    assert {name for name in names if ".dist-info/" not in name} == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)
    with tarfile.open(sdist) as archive:
        members = {name.partition("/")[2] for name in archive.getnames()}
    assert {"README.md", "LICENSE", "pyproject.toml", "conversion/convert.py"} <= members


def test_the_wheel_works_in_a_clean_environment(dist, llama_folder, tmp_path):
    """With this environment's torch and transformers, but without its checkout or editable install."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    (wheel,) = dist.glob("*.whl")
    run(python, "-m", "pip", "install", "--no-deps", "--no-index", wheel)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    (site / "dependencies.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    place = {"cwd": tmp_path, "env": environment}

    location = run(python, "-c", "import hf_hyperconn.conversion.convert as c; print(c.__file__)", **place)
    assert Path(location.strip()).is_relative_to(site)
    script = python.with_name("hf-hyperconn")
    assert "convert" in run(script, "--help", **place)
    assert run(script, "convert", llama_folder, "out", **place) == "out\n"
    assert run(script, "card", "out", **place) == "out/README.md\n"
    assert "It equals its base until it is trained" in (tmp_path / "out" / "README.md").read_text()
    assert "bit for bit" in run(
        python, "-m", "hf_hyperconn.conversion", "verify", "out", "--against", llama_folder, **place
    )
