"""`hf-hyperconn card`: a model card from recorded facts."""

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hf_hyperconn.errors import CardError

from ..checkpoint.readme import README, is_by_trainer, is_ours, licence_fields, read_card
from ..files.writing import leads_out, replace_file
from .evaluation import read_evaluation
from .facts import Facts, collect_facts
from .licences import licence_of, name_problem, terms_of
from .rendering import render

if TYPE_CHECKING:
    from huggingface_hub import ModelCard

NOTICE = "Notice"


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
    """Write the README.md of a checkpoint with hyper-connections, or renew its generated sections.

    A person's text stays (see `readme`). Each file is replaced in one step.

    folder: of the checkpoint.
    results: a results file of lm-eval for it.
    base_results: the same for its base, to show beside.
    update: whether to take in a README.md without any generated section, which somebody else wrote.
    name: of the model; by default the folder's.

    Raises `UnsupportedCheckpointError` when the folder holds no such checkpoint, and `CardError` when its README.md is
    somebody else's, it or the results can't be read, or writing fails.
    """
    if base_results is not None and results is None:
        raise CardError("results of the base are shown beside the model's. Give these too, with --results.")
    folder = Path(folder)
    if not os.path.isdir(folder):
        raise CardError(f"there is no folder '{folder}'. Give that of a checkpoint with hyper-connections.")
    evaluation = read_evaluation(results) if results is not None else None
    base_evaluation = read_evaluation(base_results) if base_results is not None else None
    if leads_out(folder, readme := folder / README):
        raise CardError(f"'{readme}' is a link to '{os.path.realpath(readme)}', outside the folder. Remove it.")
    existing = _existing_card(readme, update)
    facts, warnings = collect_facts(folder, name)
    if facts.licence is None and existing is not None:  # a person may know it
        facts = replace(facts, inherited={**facts.inherited, **licence_fields(existing.data.to_dict())})
    card, kept = render(facts, evaluation, base_evaluation, existing)
    metadata = card.data.to_dict()
    contents = {README: str(card), **_notice(facts)}
    files = tuple(_write(folder / file, content) for file, content in contents.items())
    return WrittenCard(files, metadata, kept, (*warnings, *_licence_warnings(facts, metadata)))


def _existing_card(readme: Path, update: bool) -> "ModelCard | None":
    """Read the card that is there, if any; refuse somebody else's that is not to be updated."""
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
    """Return the text file that some licenses want beside the weights."""
    terms = terms_of(facts.inherited)
    is_there = any(name.lower() in ("notice", "notice.txt", "notice.md") for name in facts.files)
    return {} if terms is None or is_there else {NOTICE: f"{terms.notice}\n"}


def _licence_warnings(facts: Facts, metadata: dict) -> list[str]:
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
        replace_file(path, content.encode())
    except OSError as error:
        raise CardError(f"can't write '{path}': {error.strerror}. Fix that and run it again.") from error
    return path
