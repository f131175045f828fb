"""The results that lm-eval writes, as a model card and the Hub want them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_hyperconn.errors import CardError

from ..checkpoint.source import REPO_ID
from ..files.reading import finite, read_json

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, EvalResultEntry

# which of a task's metrics stands for it where there may be but one, best first
CHOSEN = ("acc_norm", "exact_match", "acc")


@dataclass(frozen=True)
class Score:
    """One metric of one task.

    filter: of lm-eval, that made answers out of responses; "none" for most tasks.
    shots: examples in the prompt; None where lm-eval does not say.
    error: standard error, where there is one.
    dataset, subset, split: what was scored; `dataset` is a Hub id or the name of a builder; None for a group of
        tasks, and for files.
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
        """What scores of two models have in common that can be compared."""
        return self.task, self.metric, self.filter

    @property
    def filtered_metric(self) -> str:
        """The metric for people, with the filter where there is one."""
        return self.metric if self.filter == "none" else f"{self.metric} ({self.filter})"

    @property
    def shown(self) -> str:
        """The value for people, with its standard error."""
        return f"{self.value:.4f}" if self.error is None else f"{self.value:.4f} ± {self.error:.4f}"


@dataclass(frozen=True)
class Evaluation:
    """Scores, and how they came about.

    settings: what lm-eval records of the run, for people.
    limited: whether only some samples of each task were scored.
    """

    settings: dict[str, str]
    limited: bool
    scores: tuple[Score, ...]


def read_evaluation(path: str | Path) -> Evaluation:
    """What a results file of lm-eval says; of a group of tasks only its own scores.

    Raises `CardError` when the file can't be read, or is none of lm-eval's.
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
        config = content["config"]
        settings = {
            "lm-eval": _version(content),
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
    """Every score of a task with a data set, for `model-index` in a card's metadata."""
    from huggingface_hub import EvalResult

    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=score.dataset,
            dataset_name=score.task,
            dataset_config=score.subset,
            dataset_split=score.split,
            metric_type=score.metric,
            metric_name=_described(score),
            metric_value=score.value,
        )
        for score in evaluation.scores
        if score.dataset is not None
    ]


def hub_results(evaluation: Evaluation) -> "list[EvalResultEntry]":
    """One score of each task whose data set is on the Hub, for `.eval_results`."""
    from huggingface_hub import EvalResultEntry

    chosen: dict[str, Score] = {}
    for score in evaluation.scores:
        if score.dataset is None or "/" not in score.dataset:
            continue
        if score.task not in chosen or _rank(score) < _rank(chosen[score.task]):
            chosen[score.task] = score
    return [
        EvalResultEntry(
            dataset_id=str(score.dataset),
            task_id=score.subset or "default",
            value=score.value,
            notes=f"{score.task}, {_described(score)}, lm-eval {evaluation.settings['lm-eval']}",
        )
        for score in chosen.values()
    ]


def _scores(content: dict):
    members = content.get("group_subtasks", {})
    subtasks = {name for group in content.get("groups", {}) for name in members.get(group, ())}
    for task, metrics in content["results"].items():
        if task in subtasks:
            continue
        config = content.get("configs", {}).get(task, {})
        for name, value in metrics.items():
            metric, _, filter = name.partition(",")
            if not filter or metric.endswith("_stderr") or finite(value) is None:
                continue
            error, shots = metrics.get(f"{metric}_stderr,{filter}"), content.get("n-shot", {}).get(task)
            yield Score(
                task=task,
                metric=metric,
                filter=filter,
                shots=finite(shots),
                value=value,
                error=finite(error),
                dataset=_named(config.get("dataset_path")),
                subset=_text(config.get("dataset_name")),
                split=_text(config.get("test_split")) or _text(config.get("validation_split")),
            )


def _version(content: dict) -> str:
    """Of lm-eval. Raises `KeyError` where there is none."""
    if not isinstance(version := content["lm_eval_version"], str):
        raise KeyError("lm_eval_version")
    return version


def _named(dataset: object) -> str | None:
    """A data set that has a name: where one lies on somebody's disk is not published."""
    return dataset if isinstance(dataset, str) and REPO_ID.fullmatch(dataset) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None


def _described(score: Score) -> str:
    shots = "" if score.shots is None else f", {score.shots}-shot"
    return f"{score.filtered_metric}{shots}"


def _rank(score: Score) -> int:
    return CHOSEN.index(score.metric) if score.metric in CHOSEN else len(CHOSEN)
