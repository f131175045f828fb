"""Results of lm-eval, as a model card shows them."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_hyperconn.errors import CardError

from ..checkpoint.source import REPO_ID
from ..files.reading import finite, read_json

if TYPE_CHECKING:
    from huggingface_hub import EvalResult


@dataclass(frozen=True)
class Score:
    """One metric of one task.

    filter: lm-eval's extraction of answers from responses; "none" for most tasks.
    shots: examples in the prompt; None where lm-eval does not say.
    error: standard error, where there is one.
    dataset: a Hub id or the name of a builder; None for a group of tasks, and for files.
    subset, split: of the data set.
    """

    task: str
    metric: str
    filter: str
    shots: int | float | None
    value: float
    error: float | None
    dataset: str | None
    subset: str | None
    split: str | None

    @property
    def key(self) -> tuple[str, str, str]:
        """Return the identity of the score, to compare two models."""
        return self.task, self.metric, self.filter

    @property
    def filtered_metric(self) -> str:
        """Return the metric for people, with the filter where there is one."""
        return self.metric if self.filter == "none" else f"{self.metric} ({self.filter})"

    @property
    def shown(self) -> str:
        """Return the value for people, with its standard error."""
        return f"{self.value:.4f}" if self.error is None else f"{self.value:.4f} ± {self.error:.4f}"

    @property
    def description(self) -> str:
        """Return the metric and the shots for people."""
        return self.filtered_metric if self.shots is None else f"{self.filtered_metric}, {self.shots}-shot"


@dataclass(frozen=True)
class Evaluation:
    """Scores and the settings of their run.

    settings: names and values, for people.
    limited: whether only some samples of each task were scored.
    """

    settings: dict[str, str]
    limited: bool
    scores: tuple[Score, ...]


def read_evaluation(path: str | Path) -> Evaluation:
    """Read a results file of lm-eval. A group of tasks has only its own scores.

    Raises `CardError` when the file can't be read, or is not by lm-eval.
    """
    advice = "Give the results_*.json that `lm-eval run --output_path` wrote."
    try:
        content = read_json(path)
    except OSError as error:
        raise CardError(f"can't read '{path}': {error.strerror}. {advice}") from error
    except ValueError as error:
        raise CardError(f"'{path}' is not JSON ({error}). {advice}") from error
    try:
        scores = tuple(_scores(content))
        config, version = content["config"], content["lm_eval_version"]
        if not isinstance(version, str):
            raise KeyError("lm_eval_version")
        settings = {
            "lm-eval": version,
            "Transformers": content.get("transformers_version"),
            "dtype": str(config["model_dtype"]).removeprefix("torch.") if config.get("model_dtype") else None,
            "batch size": config.get("batch_size"),
            "samples of each task": config.get("limit"),
            "seed": config.get("random_seed"),
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise CardError(f"'{path}' is not a results file of lm-eval: it lacks {error}. {advice}") from error
    if not scores:
        raise CardError(f"'{path}' holds no scores. {advice}")
    shown = {name: str(value) for name, value in settings.items() if value is not None}
    return Evaluation(shown, config.get("limit") is not None, scores)


def model_index(evaluation: Evaluation) -> "list[EvalResult]":
    """Return the scores of tasks with a data set, for `model-index` in a card's metadata."""
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=score.dataset,
            dataset_name=score.task,
            dataset_config=score.subset,
            dataset_split=score.split,
            metric_type=score.metric,
            metric_name=score.description,
            metric_value=score.value,
        )
        for score in evaluation.scores
        if score.dataset is not None
    ]


def _scores(content: dict) -> Iterator[Score]:
    groups = content.get("group_subtasks", {})
    subtasks = {task for group in content.get("groups", {}) for task in groups.get(group, ())}
    for task, metrics in content["results"].items():
        if task in subtasks:
            continue
        config = content.get("configs", {}).get(task, {})
        for name, value in metrics.items():
            metric, _, filter = name.partition(",")
            if not filter or metric.endswith("_stderr") or finite(value) is None:
                continue
            dataset = _text(config.get("dataset_path"))
            yield Score(
                task=task,
                metric=metric,
                filter=filter,
                shots=finite(content.get("n-shot", {}).get(task)),
                value=value,
                error=finite(metrics.get(f"{metric}_stderr,{filter}")),
                # the place of a data set on somebody's disk is not published
                dataset=dataset if dataset and REPO_ID.fullmatch(dataset) else None,
                subset=_text(config.get("dataset_name")),
                split=_text(config.get("test_split")) or _text(config.get("validation_split")),
            )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
