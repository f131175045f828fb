"""Every snippet of the README and of `docs/` runs, most of them here, with a stand-in Hub that serves a tiny Llama."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import LlamaForCausalLM

from hf_hyperconn.conversion.demo import byte_tokenizer

from .conftest import llama_config
from .pages import REPOSITORY, pages, read, snippets
from .writable_hub import WritableHub

# pages whose snippets run here, in their order, but for those that `ELSEWHERE` has
PAGES = [
    "README.md",
    "docs/analysis.md",
    "docs/connections.md",
    "docs/conversion.md",
    "docs/peft.md",
    "docs/performance.md",
    "docs/publishing.md",
    "docs/trainers.md",
]
# other snippets: a word of each, by which a test finds it; the empty word is in all
ELSEWHERE = {
    "docs/adding_a_connection.md": {"": "test_adding_a_connection.py"},
    "docs/adding_a_family.md": {"": "test_adding_a_family.py"},
    "docs/quantised.md": dict.fromkeys(
        ("oneshot", "TorchAoConfig", "BitsAndBytesConfig", 'from_pretrained("Llama-3.2-1B-HCx4-quantised"'),
        "campaigns/quantised/cases.py",
    ),
    "docs/scale.md": dict.fromkeys(("Schedule1F1B", "DistributedConfig"), "test_pipelines.py"),
    "docs/serving.md": {
        "lm-eval": "test_evaluation.py",
        **dict.fromkeys(
            ("import app", "serve.py", "OpenAI", "generate_batch", "OnnxExporter", "openvino.convert_model"),
            "test_serving.py",
        ),
    },
    "docs/trainers.md": dict.fromkeys(
        ("LightningModule", "SentenceTransformerTrainer", "SetFitModel", "mergekit-yaml", "lighteval accelerate"),
        "campaigns/trainers/cases.py",
    ),
    "docs/training.md": dict.fromkeys(
        ("runs/one-gpu", "runs/ddp", "examples/configs/fsdp2.yaml", "runs/multi-node", "runs/tp", "merge-weights"),
        "test_scale_out.py",
    ),
    "docs/vision.md": dict.fromkeys(
        ("--base_steps", "runs/cifar10", "AutoImageProcessor", "hc_param_groups", "load_hc"), "test_vision_page.py"
    ),
}
MODEL = "meta-llama/Llama-3.2-1B"


def elsewhere(page: str, code: str) -> dict[str, str]:
    """Return the tests that run a snippet elsewhere, by its words."""
    return {word: test for word, test in ELSEWHERE.get(page, {}).items() if word in code}


@pytest.fixture(scope="module")
def environment(tmp_path_factory):
    """An environment whose Hub serves a tiny model."""
    folder = tmp_path_factory.mktemp("hub")
    model = LlamaForCausalLM(llama_config(vocab_size=256, initializer_range=0.2))
    model.save_pretrained(folder / "base")
    byte_tokenizer().save_pretrained(folder / "base")
    (folder / "hub").mkdir()
    with WritableHub(folder / "hub", {"hf_me": ("me",)}) as hub:
        hub.push(MODEL, folder / "base")
        variables = {**os.environ, "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "home"), "HF_HUB_OFFLINE": "0"}
        yield {**variables, "PYTHONPATH": str(REPOSITORY), "HF_HUB_DISABLE_XET": "1", "HF_TOKEN": "hf_me"}


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_snippets_run_in_their_order(page, environment, tmp_path):
    place = {"cwd": tmp_path, "env": environment}
    (tmp_path / "article.txt").write_text("def read(self):\n    return self.value\n" * 50)
    ran = []
    for language, code in snippets(page):
        if elsewhere(page, code):
            continue
        if language == "bash":
            commands = [shlex.split(line) for line in code.splitlines()]
            assert all(command.pop(0) == "hf-hyperconn" for command in commands)
            commands = [[sys.executable, "-m", "hf_hyperconn.conversion", *command] for command in commands]
        elif language == "python":
            commands = [[sys.executable, "-c", code]]
        else:
            continue
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, **place)
            assert done.returncode == 0, f"{code}\n{done.stderr}"
        ran.append(code)
    assert ran


@pytest.mark.parametrize("page", pages())
def test_every_snippet_is_run_by_one_test(page):
    for language, code in snippets(page):
        assert language in ("bash", "python", "diff", "sh", "text"), f"a block of what?\n{code}"
        claims = elsewhere(page, code)
        if language in ("bash", "python") and (claims or page not in PAGES):
            assert len(claims) == 1, f"run by {claims or 'no test'}:\n{code}"
            ((word, test),) = claims.items()
            source = (Path(__file__).parent / test).read_text(encoding="utf-8")
            assert page in source
            assert word in source


def test_the_two_commands_are_in_the_makefile():
    commands = "".join(code for language, code in snippets("README.md") if language == "sh")
    makefile = read("Makefile")
    targets = re.findall(r"^make (\w+)", commands, re.M)
    assert targets == ["demo", "test"]
    for target in targets:
        assert re.search(rf"^{target}:", makefile, re.M)


def test_the_table_of_installation_has_every_extra():
    tomllib = pytest.importorskip("tomllib")
    project = tomllib.loads(read("pyproject.toml"))["project"]
    page = read("docs/install.md")
    rows = dict(re.findall(r"`pip install \"\.\[(\w+)\]\"` \| ([^|]+) \|", page))
    extras = {name: ", ".join(packages) for name, packages in project["optional-dependencies"].items()}
    assert rows == {name: packages for name, packages in extras.items() if name not in ("dev", "docs")}
    (required,) = re.findall(r"`pip install \.` \| ([^|]+) \|", page)
    for package in project["dependencies"]:
        if ">=" in package:
            assert package.replace(">=", " ≥ ").replace(",<", " and < ") in required


def test_the_readme_gives_the_measured_differences():
    """Those of docs/results.md, whose tables are made of the results, with fewer digits."""
    results = read("docs/results.md")

    def measured(table: str, row: str, digits: int = 2) -> list[str]:
        rows = results.partition(f"<!-- {table} -->")[2].partition(f"<!-- /{table} -->")[0].splitlines()
        (cells,) = [line for line in rows if line.startswith(f"| {row} |")]
        pairs = re.findall(r"([+-][\d.]+) ± ([\d.]+)", cells)
        return [f"{float(mean):+.{digits}f} ± {float(interval):.{digits}f}" for mean, interval in pairs]

    shown = re.findall(r"[+-][\d.]+ ± [\d.]+", read("README.md"))
    assert shown == [
        *measured("deep scratch", "skips")[::2],  # the other is against more time than they need
        *measured("deep scratch", "DHC×4 history by type"),
        *measured("deep muon", "DHC×4 history by type, Muon")[::2],  # in the same time it is interpolated
        *measured("deep saturated", "DHC×4 history by type", digits=3),
    ]


def test_links_lead_somewhere():
    for page in (*pages(), "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md"):
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#]*)(?:#([^)]+))?\)", read(page)):
            path = ((REPOSITORY / page).parent / target) if target else REPOSITORY / page
            assert path.exists(), f"{page}: {target}"
            if anchor:
                headings = re.findall(r"^#+ (.*)", path.read_text(encoding="utf-8"), re.M)
                anchors = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
                assert anchor in anchors, f"{page}: {target}#{anchor}"


def test_the_counts_of_transformers_own_tests_are_those_recorded():
    recorded = json.loads(read("docs/transformers_suite.json"))
    text = read("docs/families.md")
    (release,) = re.findall(r"On Transformers ([\d.]+):\n", text)
    rows = re.findall(r"^\| (HC\w+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|$", text, re.M)
    columns = ("passed", "failed", "failed by the base, too", "skipped")
    counts = {name: dict(zip(columns, map(int, row), strict=True)) for name, *row in rows}
    assert counts == recorded[release]
