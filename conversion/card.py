"""`hf-hyperconn card`: a model card from recorded facts."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_hyperconn.errors import CardError
from hf_hyperconn.families.reading.classes import auto_class
from hf_hyperconn.kinds import kind_of

from .cards.evaluation import Evaluation, hub_results, read_evaluation
from .cards.facts import DTYPES, Facts, collect_facts, joined, metadata_of
from .cards.licences import licence_of, name_problem, terms_of
from .checkpoint.base_card import README, licence_fields
from .checkpoint.readme import (
    is_by_trainer,
    is_ours,
    is_stamped,
    merge,
    read_card,
    stamp,
    stamp_file,
    trainer_facts,
    written_into,
)
from .files.reading import read_text
from .files.writing import leads_out, replace_file

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

# `model_cards` lies beside this folder, in a checkout and in the installed package
TEMPLATE = Path(__file__).resolve().parents[1] / "model_cards" / "template.md"
NOTICE = "Notice"
HUB_RESULTS = ".eval_results/lm_eval.yaml"


@dataclass(frozen=True)
class WrittenCard:
    """A card that was written.

    files: the card, and what was written with it.
    metadata: what the Hub reads of the card.
    kept: generated sections that stay as they were: a person edited them, or there are no facts for them now.
    warnings: what to see to before publishing.
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
    """Write the README.md of a checkpoint with hyper-connections, or renew what was generated of it.

    What a person wrote into it, or changed in the scores for the Hub, stays (see `card_text`). Each file is
    replaced in one step.

    folder: of the checkpoint.
    results: a results file of lm-eval for it.
    base_results: the same for its base, to show beside.
    update: whether a README.md without any generated section, which somebody else wrote, is taken in.
    name: of the model; by default that of the folder.

    Raises `UnsupportedCheckpointError` when the folder holds no such checkpoint, and `CardError` when its README.md is
    somebody else's, it or the results can't be read, or writing fails.
    """
    if base_results is not None and results is None:
        raise CardError("results of the base are shown beside the model's. Give these too, with --results.")
    folder = Path(folder)
    if not os.path.isdir(folder):
        raise CardError(f"there is no folder '{folder}'. Give that of a checkpoint with hyper-connections.")
    evaluation = read_evaluation(results) if results is not None else None
    of_base = read_evaluation(base_results) if base_results is not None else None
    _check_links(folder)
    readme = folder / README
    existing = read_card(readme) if os.path.isfile(readme) else None
    if existing is not None and not update and not is_ours(existing.text):
        author = "Transformers' Trainer" if is_by_trainer(existing.text) else "somebody else"
        raise CardError(
            f"'{readme}' was written by {author}. --update adds the sections of a card to it and keeps what a person "
            f"wrote."
        )
    facts, warnings = collect_facts(folder, name)
    if licence_of(facts.inherited) is None and existing is not None:  # a person may know it
        facts = replace(facts, inherited={**facts.inherited, **licence_fields(existing.data.to_dict())})
    card, kept = _render(facts, evaluation, of_base, existing)
    metadata = card.data.to_dict()
    contents = {README: str(card), **_notice(facts), **_for_the_hub(evaluation)}
    if HUB_RESULTS in contents and _is_a_persons(path := folder / HUB_RESULTS, contents[HUB_RESULTS]):
        del contents[HUB_RESULTS]
        warnings = [
            *warnings,
            f"'{path}' stays as it is, without these results: somebody has changed what a card wrote there. Edit it, "
            f"or remove it to have it written again.",
        ]
    files = tuple(_write(folder / file, content) for file, content in contents.items())
    return WrittenCard(files, metadata, kept, (*warnings, *_to_see_to(facts, metadata)))


def _render(
    facts: Facts, evaluation: Evaluation | None, of_base: Evaluation | None, existing: "ModelCard | None"
) -> "tuple[ModelCard, tuple[str, ...]]":
    """The card, and the generated sections that stay as they were."""
    from huggingface_hub import ModelCard

    before = "" if existing is None else existing.text
    data, values = metadata_of(facts, evaluation), _values(facts, evaluation, of_base)
    card = ModelCard.from_template(data, template_path=str(TEMPLATE), trainer=trainer_facts(before), **values)
    text = stamp(card.text)
    kept: tuple[str, ...] = ()
    if is_by_trainer(before):
        text = f"{text}\n{written_into(before)}"
    elif existing is not None:
        text, kept = merge(before, text)
    card.text = f"\n{text.strip()}\n"
    if existing is not None:
        theirs: Any = existing.data
        card.data = joined(theirs, data, theirs_first=not is_by_trainer(before))
    return card, kept


def _values(facts: Facts, evaluation: Evaluation | None, of_base: Evaluation | None) -> dict:
    """What the template shows besides the metadata."""
    found = facts.inspection
    kind = kind_of(found.fields)
    base: str | None
    if facts.base is not None:
        base = f"[{facts.base}](https://huggingface.co/{facts.base})"
    else:
        base = facts.base_name and f"{facts.base_name} (a local checkpoint)"
    return {
        "facts": facts,
        "found": found,
        "base": base,
        "kind": kind,
        "kind_link": f"[{kind.title}](https://arxiv.org/abs/{kind.paper})",
        "settings": ", ".join(kind.settings(found.fields)),
        "streams": kind.streams(found.fields),
        "handed_on": kind.handed_on(found.fields),
        "exactness": f"bit for bit{' in 16 bits and within rounding in float32' * kind.is_rounded}",
        "auto_class": auto_class(facts.head),
        "generates": facts.head in facts.family.source.generative,
        "dtype": DTYPES.get(found.dtype, found.dtype),
        "added_parameters": _share(found.added_parameters, found.parameters),
        "added_flops": _share(found.added_flops, found.flops),
        "versions": facts.record.get("versions") or {},
        "terms": terms_of(facts.inherited),
        "evaluation": evaluation,
        "compared": of_base is not None,
        "scores": [] if evaluation is None else _rows(evaluation, of_base),
    }


def _share(added: int, whole: int | None) -> str:
    if whole is None:  # of a quantised model
        return f"{added:,}"
    return f"{added:,}, {100 * added / (whole - added):.3g} % of the rest's {whole - added:,}"


def _rows(evaluation: Evaluation, of_base: Evaluation | None) -> list[list[str]]:
    """A row of the table for each score of the model, with its base's where there is one."""
    theirs = {score.key: score for score in of_base.scores} if of_base is not None else {}
    rows = []
    for score in evaluation.scores:
        row = [score.task, score.filtered_metric, "" if score.shots is None else str(score.shots), score.shown]
        if of_base is not None:
            row.append(theirs[score.key].shown if score.key in theirs else "")
        rows.append(row)
    return rows


def _notice(facts: Facts) -> dict[str, str]:
    """The text file that some licences want beside the weights."""
    terms = terms_of(facts.inherited)
    there = any(name.lower() in ("notice", "notice.txt", "notice.md") for name in facts.files)
    return {} if terms is None or there else {NOTICE: f"{terms.notice}\n"}


def _for_the_hub(evaluation: Evaluation | None) -> dict[str, str]:
    """Scores in the format of the Hub's leaderboards."""
    from huggingface_hub import eval_result_entries_to_yaml
    from huggingface_hub.utils import yaml_dump

    if evaluation is None or evaluation.limited or not (entries := hub_results(evaluation)):
        return {}
    return {HUB_RESULTS: stamp_file(yaml_dump(eval_result_entries_to_yaml(entries), sort_keys=False))}


def _is_a_persons(path: Path, content: str) -> bool:
    """Whether a file is there that no card wrote as it is now, and that holds something else than `content`.

    Raises `CardError` when it can't be read.
    """
    if path.is_symlink() or not os.path.isfile(path):
        return False
    try:
        there = read_text(path)
    except OSError as error:
        raise CardError(f"can't read '{path}': {error.strerror}. Allow that, or remove it.") from error
    except ValueError:  # no text
        return True
    return not is_stamped(there) and there != content.partition("\n")[2]


def _to_see_to(facts: Facts, metadata: dict) -> list[str]:
    """Warnings about the licence of the base."""
    if "license" not in metadata:
        if facts.base_name is None:
            return []
        return [f"no licence is known: add `license:` to the metadata of {README} before you publish the model."]
    problems = [name_problem(facts.name, metadata)]
    if terms_of(metadata) is not None and not facts.licence_files:
        problems.append(
            f"the licence of the base ({licence_of(metadata)}) requires a copy of it with the weights, and there "
            f"is none: copy it from the base before you publish the model."
        )
    return [problem for problem in problems if problem]


def _write(path: Path, content: str) -> Path:
    try:
        path.parent.mkdir(exist_ok=True)
        replace_file(path, content.encode())
    except OSError as error:
        raise CardError(f"can't write '{path}': {error.strerror}. Fix that and run it again.") from error
    return path


def _check_links(folder: Path) -> None:
    for path in (folder / README, (folder / HUB_RESULTS).parent):
        if leads_out(folder, path):
            raise CardError(f"'{path}' is a link to '{os.path.realpath(path)}', outside the folder. Remove it.")
