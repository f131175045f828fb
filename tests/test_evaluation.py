"""Scores of a conversion by lm-eval's own command line, where hf_hyperconn can't be imported: those of its base."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from hf_hyperconn.conversion.card import write_card
from hf_hyperconn.conversion.convert import convert_checkpoint

from .marks import tail
from .pages import snippets
from .processes import without_package

pytest.importorskip("lm_eval", reason="needs the extra `eval`")

TASKS = Path(__file__).with_name("evaluation")
CONVERTED = "Llama-3.2-1B-HCx4"  # on the page


@pytest.fixture(scope="module")
def place(stories, text, tmp_path_factory) -> Path:
    """A folder with a base, its conversion under the name on the page, and the questions of the local tasks."""
    place = tmp_path_factory.mktemp("evaluation")
    (place / "base").symlink_to(stories)
    convert_checkpoint(str(stories), place / CONVERTED, verify="off")
    passages = [" ".join(text[start : start + 2500].split()) for start in range(10_000, 90_000, 10_000)]
    words = [passage.split() for passage in passages]
    endings = [" ".join(passage[60:70]) for passage in words]
    questions = [
        {"beginning": " ".join(passage[:60]), "endings": [endings[i - 1], endings[i], endings[i - 2]], "answer": 1}
        for i, passage in enumerate(words)
    ]
    for name, rows in (("endings", questions), ("passages", [{"text": passage} for passage in passages])):
        (place / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    return place


def command(model: str, dtype: str, output: Path) -> list[str]:
    """Return the page's command for another model and dtype, on the local tasks."""
    (line,) = [code for language, code in snippets("docs/serving.md") if code.startswith("lm-eval")]
    changes = {CONVERTED: model, "=bfloat16": f"={dtype}", "hellaswag": "endings,passages", "results": str(output)}
    for old, new in changes.items():
        assert line.count(old) == 1
        line = line.replace(old, new)
    program, *arguments = shlex.split(f"{line} --include_path {TASKS} --device cpu --log_samples")
    assert program == "lm-eval"
    return [sys.executable, "-m", "lm_eval", *arguments]


def report(folder: Path) -> dict:
    """Return scores, and every sample with its log-likelihoods."""
    (results,) = folder.rglob("results_*.json")
    facts = {"results": json.loads(results.read_text(encoding="utf-8"))["results"]}
    for task in ("endings", "passages"):
        (samples,) = folder.rglob(f"samples_{task}_*.jsonl")
        facts[task] = [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]
    return facts


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", *tail("float32")])
def test_a_conversion_scores_what_its_base_scores(dtype, place, tmp_path):
    running = []
    for model in ("base", CONVERTED):
        environment = without_package(tmp_path / f"{model} elsewhere")
        environment |= {"HF_DATASETS_CACHE": str(tmp_path / f"{model} datasets")}
        running.append(
            subprocess.Popen(
                command(model, dtype, tmp_path / model),
                cwd=place,
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
        )
    for process in running:
        printed, _ = process.communicate()
        assert process.returncode == 0, printed
    base, converted = report(tmp_path / "base"), report(tmp_path / CONVERTED)
    assert converted == base
    assert 1 < base["results"]["passages"]["byte_perplexity,none"] < 256
    likelihoods = [response for sample in base["endings"] for ((response, _),) in sample["resps"]]
    assert len(likelihoods) == 3 * len(base["endings"]) == 24
    assert len(set(likelihoods)) > 12

    from lm_eval.utils import make_table

    (results,), (of_base,) = (list((tmp_path / name).rglob("results_*.json")) for name in (CONVERTED, "base"))
    (card, *_) = write_card(place / CONVERTED, results=str(results), base_results=str(of_base)).files
    scores = re.findall(
        r"^\| (endings|passages) \| (\w+) \| 0 \| ([\d.]+)[^|]*\| ([\d.]+)[^|]*\|$",
        card.read_text(encoding="utf-8"),
        re.M,
    )
    assert len(scores) == 5
    table = re.sub(" +", " ", make_table(json.loads(results.read_text(encoding="utf-8"))))
    for task, metric, value, same in scores:
        assert value == same
        assert re.search(
            rf"^\|({task}|)\|.*\|{metric}\|.\|{value}\|", table.replace(" |", "|").replace("| ", "|"), re.M
        )
