"""Scores in a card."""

import json

import pytest
from huggingface_hub import ModelCard

from hf_hyperconn.conversion.card import write_card
from hf_hyperconn.errors import CardError

from .conftest import RESULTS, results_file, sections, text_of


def test_evaluation(folder, tmp_path):
    of_base = json.loads(json.dumps(RESULTS["results"]))
    of_base["arc_easy"]["acc,none"] = 0.5
    del of_base["mmlu"]
    (tmp_path / "base.json").write_text(json.dumps({**RESULTS, "results": of_base}))
    write_card(folder, results=results_file(tmp_path), base_results=str(tmp_path / "base.json"))
    assert sections(text_of(folder))["evaluation"] == (
        "## Evaluation\n\n"
        "| task | metric | shots | this model | base |\n"
        "|---|---|---|---|---|\n"
        "| arc_easy | acc | 0 | 0.6500 ± 0.0100 | 0.5000 ± 0.0100 |\n"
        "| arc_easy | acc_norm | 0 | 0.6125 | 0.6125 |\n"
        "| mmlu | acc | 5 | 0.3100 ± 0.0040 |  |\n"
        "| gsm8k | exact_match (strict-match) | 5 | 0.0500 | 0.0500 |\n\n"
        "lm-eval 0.4.13, Transformers 5.23.0, dtype bfloat16, batch size 8, seed 0.\n"
    )
    data = ModelCard.load(folder / "README.md").data
    assert data.model_name == folder.name
    assert [(result.dataset_type, result.metric_type, result.metric_value) for result in data.eval_results] == [
        ("allenai/ai2_arc", "acc", 0.65),
        ("allenai/ai2_arc", "acc_norm", 0.6125),
        ("json", "exact_match", 0.05),
    ]

    once = text_of(folder)
    assert write_card(folder).kept == ("evaluation",)
    assert text_of(folder) == once
    better = {"arc_easy": {"alias": "arc_easy", "acc,none": 0.7}}
    data = write_card(folder, results=results_file(tmp_path, results=better)).metadata
    (model,) = data["model-index"]
    values = {metric["name"]: metric["value"] for result in model["results"] for metric in result["metrics"]}
    assert values == {"acc, 0-shot": 0.7, "acc_norm, 0-shot": 0.6125, "exact_match (strict-match), 5-shot": 0.05}


def test_scores_of_some_samples_are_shown_but_not_reported(folder, tmp_path):
    config = {**RESULTS["config"], "limit": 10}
    written = write_card(folder, results=results_file(tmp_path, config=config))
    assert "samples of each task 10" in text_of(folder)
    assert "model-index" not in written.metadata


def test_where_a_data_set_lies_is_not_published(folder, tmp_path):
    """A path, or the argument of somebody's script."""
    for place in ("/home/me/questions", "./questions", {"path": "/home/me"}):
        configs = {**RESULTS["configs"], "arc_easy": {"dataset_path": place}}
        write_card(folder, results=results_file(tmp_path, configs=configs), update=True)
        assert "| arc_easy | acc | 0 | 0.6500" in text_of(folder)
        data = ModelCard.load(folder / "README.md").data
        assert [result.dataset_type for result in data.eval_results] == ["json"]
        assert "/home/me" not in text_of(folder)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not JSON"),
        ("[]", "is not a results file of lm-eval"),
        ("{}", "is not a results file of lm-eval"),
        (json.dumps({**RESULTS, "results": {}}), "holds no scores"),
        (json.dumps({**RESULTS, "results": {"arc_easy": 3}}), "is not a results file of lm-eval"),
        *(
            (
                json.dumps({**RESULTS, "lm_eval_version": version}),
                r"is not a results file of lm-eval: it lacks 'lm_eval_version'. Give the",
            )
            for version in (None, 5, [])
        ),
    ],
)
def test_results_that_are_none(content, message, folder, tmp_path):
    before = text_of(folder)
    (tmp_path / "results.json").write_text(content)
    with pytest.raises(CardError, match=message):
        write_card(folder, results=str(tmp_path / "results.json"))
    assert text_of(folder) == before
