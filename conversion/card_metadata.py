"""The metadata of a model card, which the Hub reads."""

from typing import TYPE_CHECKING

from .card_facts import TASKS, Facts
from .evaluation import Evaluation, model_index

if TYPE_CHECKING:
    from huggingface_hub import ModelCardData


def metadata_of(facts: Facts, evaluation: Evaluation | None) -> "ModelCardData":
    """The metadata of a model: what is known of it, what its base's card says, and scores of all samples."""
    from huggingface_hub import ModelCardData

    inherited, inspection = dict(facts.inherited), facts.inspection
    tags = ["hyper-connections", "hf-hyperconn", f"hc-x{inspection.hc_mult}", inspection.connection, "custom_code"]
    scores = [] if evaluation is None or evaluation.limited else model_index(evaluation)
    return ModelCardData(
        base_model=facts.base,
        base_model_relation="finetune" if facts.base else None,
        library_name="transformers",
        pipeline_tag=TASKS[facts.head],
        tags=[*tags, *inherited.pop("tags", [])],
        model_name=facts.name if scores else None,
        eval_results=scores or None,
        **inherited,
    )


def joined(theirs: "ModelCardData", ours: "ModelCardData", *, theirs_first: bool) -> "ModelCardData":
    """The metadata of a card that was there and of the new one, with the tags and scores of both.

    theirs_first: whether what stands in both stays as it was.
    """
    from huggingface_hub import ModelCardData

    second, first = (ours, theirs) if theirs_first else (theirs, ours)
    values = {**vars(second), **{name: value for name, value in vars(first).items() if value is not None}}
    scores = list(ours.eval_results or [])
    scores += [old for old in theirs.eval_results or [] if not any(map(old.is_equal_except_value, scores))]
    values |= {"tags": [*(ours.tags or []), *(theirs.tags or [])], "eval_results": scores or None}
    values["model_name"] = values["model_name"] if scores else None
    return ModelCardData(**values)
