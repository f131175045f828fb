"""The plan of a push, file by file."""

import re
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

from ..checkpoint.checkpoint_files import INDEX, WEIGHTS
from ..terminal import gigabytes
from .folder import CheckedFolder, shown

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationCopy, HfApi, ModelInfo

WEIGHT_FILE = re.compile(rf"{re.escape(WEIGHTS)}|{re.escape(INDEX)}|model-\d{{5}}-of-\d{{5}}\.safetensors")
FATES = ("uploaded", "copied", "unchanged", "removed", "left")


@dataclass(frozen=True)
class PlannedFile:
    """A file and its fate.

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
    target: the branch that is committed to, or the one that a new branch begins at; None where there is no repo yet.
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

    @cached_property
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
        """Return the plan for machines."""
        facts = {"repo": self.repo_id, "new_repo": self.target is None, "revision": self.revision}
        return {**facts, "create_pr": self.create_pr, "files": [asdict(file) for file in self.files]}

    def describe(self) -> str:
        """Return the plan for people."""
        files = self.files
        where = self.repo_id if self.revision is None else f"{self.repo_id}@{self.revision}"
        state = " (a new repo)" if self.target is None else " (a pull request)" * self.create_pr
        sent = sum(file.size for file in files if file.fate == "uploaded")
        rows = [f"  {file.fate:<10} {gigabytes(file.size):>10}  {shown(file.name)}" for file in files]
        return "\n".join([f"Plan: {where}{state}, {gigabytes(sent)} to upload", *rows])
