"""The text and the metadata of a model card."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_hyperconn.families.reading.classes import auto_class
from hf_hyperconn.kinds import kind_of

from ..checkpoint.readme import is_by_trainer, merge, stamp, trainer_facts, written_into
from .evaluation import Evaluation, model_index
from .facts import Facts
from .licences import terms_of

if TYPE_CHECKING:
    from huggingface_hub import ModelCard, ModelCardData

# `model_cards` lies beside `conversion`, in a checkout and in the installed package
TEMPLATE = Path(__file__).resolve().parents[2] / "model_cards" / "template.md"
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# task on the Hub by the suffix of the Auto class that finds a model's class
TASKS = {
    "ForCausalLM": "text-generation",
    "ForImageTextToText": "image-text-to-text",
    "ForMultimodalLM": "any-to-any",
    "ForSeq2SeqLM": "any-to-any",
    "ForSpeechSeq2Seq": "automatic-speech-recognition",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
    "ForZeroShotImageClassification": "zero-shot-image-classification",
    "ForSemanticSegmentation": "image-segmentation",
    "ForDepthEstimation": "depth-estimation",
    "ForMaskedImageModeling": "image-feature-extraction",
    "ForVideoClassification": "video-classification",
    "ForAudioClassification": "audio-classification",
    "Backbone": "image-feature-extraction",
    "ForPreTraining": "image-feature-extraction",
    "Model": "feature-extraction",
}


def render(
    facts: Facts, evaluation: Evaluation | None, base_evaluation: Evaluation | None, existing: "ModelCard | None"
) -> "tuple[ModelCard, tuple[str, ...]]":
    """Render a card; return it with the names of the generated sections that stay as they were."""
    from huggingface_hub import ModelCard

    old_text = "" if existing is None else existing.text
    data = _metadata(facts, evaluation)
    values = _values(facts, evaluation, base_evaluation)
    card = ModelCard.from_template(data, template_path=str(TEMPLATE), trainer=trainer_facts(old_text), **values)
    text = stamp(card.text)
    kept: tuple[str, ...] = ()
    if is_by_trainer(old_text):
        text = f"{text}\n{written_into(old_text)}"
    elif existing is not None:
        text, kept = merge(old_text, text)
    card.text = f"\n{text.strip()}\n"
    if existing is not None:
        old_data: Any = existing.data
        card.data = _joined(old_data, data, old_first=not is_by_trainer(old_text))
    return card, kept


def _metadata(facts: Facts, evaluation: Evaluation | None) -> "ModelCardData":
    """Return the metadata from facts, from the base's card, and from scores of all samples."""
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


def _joined(old: "ModelCardData", new: "ModelCardData", *, old_first: bool) -> "ModelCardData":
    """Join the metadata of two cards, with the tags and scores of both.

    old_first: whether a value in both stays as it was.
    """
    from huggingface_hub import ModelCardData

    second, first = (new, old) if old_first else (old, new)
    values = {**vars(second), **{name: value for name, value in vars(first).items() if value is not None}}
    scores = list(new.eval_results or [])
    scores += [score for score in old.eval_results or [] if not any(map(score.is_equal_except_value, scores))]
    values |= {"tags": [*(new.tags or []), *(old.tags or [])], "eval_results": scores or None}
    values["model_name"] = values["model_name"] if scores else None
    return ModelCardData(**values)


def _values(facts: Facts, evaluation: Evaluation | None, base_evaluation: Evaluation | None) -> dict:
    """Return the values that the template shows besides the metadata."""
    inspection = facts.inspection
    kind = kind_of(inspection.fields)
    base = facts.base_name and f"{facts.base_name} (a local checkpoint)"
    if facts.base is not None:
        base = f"[{facts.base}](https://huggingface.co/{facts.base})"
    return {
        "facts": facts,
        "inspection": inspection,
        "base": base,
        "kind": kind,
        "kind_link": f"[{kind.title}](https://arxiv.org/abs/{kind.paper})",
        "settings": ", ".join(kind.settings(inspection.fields)),
        "streams": kind.streams(inspection.fields),
        "handed_on": kind.handed_on(inspection.fields),
        "exactness": f"bit for bit{' in 16 bits and within rounding in float32' * kind.is_rounded}",
        "auto_class": auto_class(facts.head),
        "generates": facts.head in facts.checkpoint.family.source.generative,
        "dtype": DTYPES.get(inspection.dtype, inspection.dtype),
        "added_parameters": _added(inspection.added_parameters, inspection.parameters),
        "added_flops": _added(inspection.added_flops, inspection.flops),
        "versions": facts.record.get("versions") or {},
        "terms": terms_of(facts.inherited),
        "evaluation": evaluation,
        "compared": base_evaluation is not None,
        "scores": [] if evaluation is None else _rows(evaluation, base_evaluation),
    }


def _added(added: int, total: int | None) -> str:
    if total is None:  # of a quantized model
        return f"{added:,}"
    return f"{added:,}, {100 * added / (total - added):.3g} % of the rest's {total - added:,}"


def _rows(evaluation: Evaluation, base_evaluation: Evaluation | None) -> list[list[str]]:
    """Return a row of the table for each score of the model, with its base's where there is one."""
    base_scores = {} if base_evaluation is None else {score.key: score.shown for score in base_evaluation.scores}
    rows = []
    for score in evaluation.scores:
        row = [score.task, score.filtered_metric, "" if score.shots is None else str(score.shots), score.shown]
        if base_evaluation is not None:
            row.append(base_scores.get(score.key, ""))
        rows.append(row)
    return rows
