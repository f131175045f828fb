"""`hf-hyperconn card`: a model card from recorded facts."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_hyperconn.errors import CardError
from hf_hyperconn.families.reading.classes import auto_class
from hf_hyperconn.kinds import kind_of

from ..checkpoint.readme import (
    README,
    add_digests,
    is_by_trainer,
    is_ours,
    license_fields,
    merge,
    read_card,
    text_by_people,
    trainer_facts,
)
from ..files.writing import leads_out, replace_file
from .evaluation import Evaluation, model_index, read_evaluation
from .facts import Facts, collect_facts
from .licenses import license_of, name_problem, terms_of

if TYPE_CHECKING:
    from huggingface_hub import ModelCard, ModelCardData

NOTICE = "Notice"
SITE = "https://hf-hyperconn.github.io/hf_hyperconn"  # the documentation

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


@dataclass(frozen=True)
class WrittenCard:
    """A card that was written.

    files: the card, and files written with it.
    metadata: the card's metadata.
    kept: generated sections that stay unchanged: a person edited them, or their facts are missing.
    warnings: problems to solve before publishing.
    """

    files: tuple[Path, ...]
    metadata: dict
    kept: tuple[str, ...]
    warnings: tuple[str, ...]


def write_card(
    folder: str | Path,
    *,
    results: str | None = None,
    base_results: str | None = None,
    update: bool = False,
    name: str | None = None,
) -> WrittenCard:
    """Write the README.md of a checkpoint with hyper-connections, or renew its generated sections.

    A person's text stays (see `readme`). Each file is replaced in one step.

    folder: of the checkpoint.
    results: a results file of lm-eval for it.
    base_results: the same for its base, to show beside.
    update: whether to add sections to a README.md without generated ones, which somebody else wrote.
    name: of the model; by default the folder's.

    Raises `UnsupportedCheckpointError` when the folder contains no such checkpoint. Raises `CardError` when its
    README.md is somebody else's, it or the results can't be read, or writing fails.
    """
    if base_results is not None and results is None:
        raise CardError("--base-results requires --results, the results of the model itself. Give both, or neither.")
    folder = Path(folder)
    if not os.path.isdir(folder):
        raise CardError(f"there is no folder '{folder}'. Give the folder of a checkpoint with hyper-connections.")
    evaluation = read_evaluation(results) if results is not None else None
    base_evaluation = read_evaluation(base_results) if base_results is not None else None
    if leads_out(folder, readme := folder / README):
        raise CardError(f"'{readme}' is a link to '{os.path.realpath(readme)}', outside the folder. Remove it.")
    existing = _existing_card(readme, update)
    facts, warnings = collect_facts(folder, name)
    if facts.license is None and existing is not None:  # a person may know it
        facts = replace(facts, inherited={**facts.inherited, **license_fields(existing.data.to_dict())})
    card, kept = _render(facts, evaluation, base_evaluation, existing)
    metadata = card.data.to_dict()
    contents = {README: str(card), **_notice(facts)}
    files = tuple(_write(folder / file, content) for file, content in contents.items())
    return WrittenCard(files, metadata, kept, (*warnings, *_license_warnings(facts, metadata)))


def _render(
    facts: Facts, evaluation: Evaluation | None, base_evaluation: Evaluation | None, existing: "ModelCard | None"
) -> "tuple[ModelCard, tuple[str, ...]]":
    """Render a card; return it with the names of the generated sections that stay as they were."""
    from huggingface_hub import ModelCard

    old_text = "" if existing is None else existing.text
    data = _metadata(facts, evaluation)
    values = _values(facts, evaluation, base_evaluation)
    card = ModelCard.from_template(data, template_path=str(TEMPLATE), trainer=trainer_facts(old_text), **values)
    text = add_digests(card.text)
    kept: tuple[str, ...] = ()
    if is_by_trainer(old_text):
        text = f"{text}\n{text_by_people(old_text)}"
    elif existing is not None:
        text, kept = merge(old_text, text)
    card.text = f"\n{text.strip()}\n"
    if existing is not None:
        old_data: Any = existing.data
        card.data = _join(old_data, data, old_first=not is_by_trainer(old_text))
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


def _join(old: "ModelCardData", new: "ModelCardData", *, old_first: bool) -> "ModelCardData":
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
        "kind_link": f"[{kind.title}]({kind.link})",
        "settings": ", ".join(kind.settings(inspection.fields)),
        "streams": kind.streams(inspection.fields),
        "between_layers": kind.between_layers(inspection.fields),
        "site": SITE,
        "exactness": f"bit for bit{' in 16 bits and within rounding in float32' * kind.is_rounded}",
        "auto_class": auto_class(facts.head),
        "generates": facts.head in facts.checkpoint.family.source.generative,
        "dtype": DTYPES.get(inspection.dtype, inspection.dtype),
        "added_parameters": _added_share(inspection.added_parameters, inspection.parameters),
        "added_flops": _added_share(inspection.added_flops, inspection.flops),
        "versions": facts.record.get("versions") or {},
        "terms": terms_of(facts.inherited),
        "evaluation": evaluation,
        "compared": base_evaluation is not None,
        "scores": [] if evaluation is None else _rows(evaluation, base_evaluation),
    }


def _added_share(added: int, total: int | None) -> str:
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


def _existing_card(readme: Path, update: bool) -> "ModelCard | None":
    """Read an existing card; refuse somebody else's card without `update`."""
    if not os.path.isfile(readme):
        return None
    card = read_card(readme)
    if not update and not is_ours(card.text):
        author = "Transformers' Trainer" if is_by_trainer(card.text) else "somebody else"
        raise CardError(
            f"'{readme}' was written by {author}. --update adds the sections of a card to it and keeps what a person "
            f"wrote."
        )
    return card


def _notice(facts: Facts) -> dict[str, str]:
    """Return the text file that some licenses require beside the weights."""
    terms = terms_of(facts.inherited)
    is_there = any(name.lower() in ("notice", "notice.txt", "notice.md") for name in facts.files)
    return {} if terms is None or is_there else {NOTICE: f"{terms.notice}\n"}


def _license_warnings(facts: Facts, metadata: dict) -> list[str]:
    if "license" not in metadata:
        if facts.base_name is None:
            return []
        return [f"no license is known: add `license:` to the metadata of {README} before you publish the model."]
    problems = [name_problem(facts.name, metadata)]
    if terms_of(metadata) is not None and not facts.license_files:
        problems.append(
            f"the license of the base ({license_of(metadata)}) requires a copy of it with the weights, and there "
            f"is none: copy it from the base before you publish the model."
        )
    return [problem for problem in problems if problem]


def _write(path: Path, content: str) -> Path:
    try:
        replace_file(path, content.encode())
    except OSError as error:
        raise CardError(f"can't write '{path}': {error.strerror}. Fix that and run it again.") from error
    return path
