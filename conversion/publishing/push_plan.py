"""What a push will do, file by file."""

import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from hf_hyperconn.errors import PushError

from ..checkpoint.base_card import is_term
from ..checkpoint.checkpoint_files import INDEX, WEIGHTS
from ..planning.plan import gigabytes
from .folder import CheckedFolder, shown

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationCopy, HfApi, ModelInfo

WEIGHT_FILE = re.compile(rf"{re.escape(WEIGHTS)}|{re.escape(INDEX)}|model-\d{{5}}-of-\d{{5}}\.safetensors")
FATES = ("uploaded", "copied", "unchanged", "removed", "left")


@dataclass(frozen=True)
class PlannedFile:
    """What becomes of a file.

    fate: "uploaded" from here, "copied" on the Hub from the base's repo, "unchanged" where the repo holds it already,
        "removed" from the repo, or "left" here.
    size: in bytes.
    """

    name: str
    fate: str
    size: int


@dataclass(frozen=True)
class PushPlan:
    """A checked push, of which nothing is done yet.

    folder: what is pushed.
    target: what the Hub says of the branch that is committed to, or of the one that a new branch begins at; None where
        there is no repo yet.
    base_copies: files of the base's repo that the Hub is asked to copy.
    new_branch: whether `revision` has to be made.
    """

    folder: CheckedFolder
    repo_id: str
    target: "ModelInfo | None"
    base_copies: "dict[str, CommitOperationCopy]"
    private: bool
    create_pr: bool
    revision: str | None
    new_branch: bool
    api: "HfApi" = field(repr=False)

    @property
    def files(self) -> tuple[PlannedFile, ...]:
        """Every file of the folder, and those that the repo loses; together by their fate."""
        folder = self.folder
        held = {sibling.rfilename: sibling for sibling in (self.target and self.target.siblings) or ()}
        fates = {name: "uploaded" for name in folder.names} | dict.fromkeys(self.base_copies, "copied")
        fates |= {name: "unchanged" for name in folder.names & held.keys() if folder.equals(name, held[name])}
        fates |= dict.fromkeys(folder.left, "left")
        sizes = {name: folder.source.files[name] for name in fates}
        for name, sibling in held.items():
            if WEIGHT_FILE.fullmatch(name) and name not in folder.names:
                fates[name], sizes[name] = "removed", sibling.size or 0
        planned = (PlannedFile(name, fate, sizes[name]) for name, fate in fates.items())
        return tuple(sorted(planned, key=lambda file: (FATES.index(file.fate), file.name)))

    def as_dict(self) -> dict:
        """The plan for machines."""
        facts = {"repo": self.repo_id, "new_repo": self.target is None, "revision": self.revision}
        return {**facts, "create_pr": self.create_pr, "files": [asdict(file) for file in self.files]}

    def describe(self) -> str:
        """The plan for people."""
        files = self.files
        where = f"{self.repo_id}{f'@{self.revision}' * (self.revision is not None)}"
        state = "a new repo" if self.target is None else "a pull request" * self.create_pr
        rows = [f"  {file.fate:<10} {gigabytes(file.size):>10}  {shown(file.name)}" for file in files]
        sent = sum(file.size for file in files if file.fate == "uploaded")
        head = f"Plan: {where}{f' ({state})' * bool(state)}, {gigabytes(sent)} to upload"
        return "\n".join([head, *rows])


if TYPE_CHECKING:
    from huggingface_hub import ModelInfo

LICENCE = "license"


def check_terms(base: str, info: "ModelInfo | None", repo_id: str, metadata: dict, say: Callable[[str], None]) -> None:
    """Make sure that a public repo may hold a conversion of `base`.

    Of a gated, private or unreadable base, the card must name a licence, and must carry over the licence and the
    gating fields (`extra_gated_*`) of the base's own card, as far as the Hub shows it.

    base: Hub id; `info` is what the Hub says of it, None when it says nothing to this user.
    repo_id: the public repo.
    metadata: of its card; empty when it has none.
    say: called with a line of advice when a gated base goes on.

    Raises `PushError` when it mayn't.
    """
    if info and not (info.gated or info.private):
        return
    theirs = info.card_data.to_dict() if info and info.card_data else {}
    lacking = [LICENCE] if not metadata.get(LICENCE) else []
    lacking += [
        field
        for field, value in theirs.items()
        if is_term(field) and not _is_carried_over(base, field, value, metadata)
    ]
    state = "can't be read" if info is None else "is gated" if info.gated else "is private"
    if lacking:
        raise PushError(
            f"the base {base!r} {state}, and {repo_id!r} would be public. Give --private, or a README.md whose "
            f"metadata carries the base's terms over (missing or different: {', '.join(dict.fromkeys(lacking))}); "
            f"`hf-hyperconn card` writes what is missing."
        )
    if info and info.gated:
        say(f"gated base    a card doesn't gate a repo: switch gating on in the settings of {repo_id!r}")


def _is_carried_over(base: str, field: str, value: Any, metadata: dict) -> bool:
    """Whether the metadata of a card holds a term of the base's: a licence is the same, what gates is there."""
    if field not in metadata or not field.startswith(LICENCE):
        return field in metadata
    if metadata[field] == value:
        return True
    # where no copy of the licence lies beside the weights, a card links to the base's
    link = rf"https://huggingface\.co/{re.escape(base)}/blob/[^/]+/{re.escape(str(value))}"
    return field == f"{LICENCE}_link" and re.fullmatch(link, str(metadata[field])) is not None
