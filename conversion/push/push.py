"""Publication of a checkpoint by one commit, in which the Hub itself copies the base's weights."""

import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hf_hyperconn
from hf_hyperconn.errors import PushError

from ..card.licenses import name_problem
from ..checkpoint.checkpoint_files import INDEX, WEIGHTS
from ..checkpoint.readme import is_term
from ..terminal import written_bytes
from .folder import CheckedFolder, Say, open_checked, printable_name
from .hub_refusals import explain_hub_errors, refuses_copies

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationCopy, HfApi, ModelInfo


WEIGHT_FILE = re.compile(rf"{re.escape(WEIGHTS)}|{re.escape(INDEX)}|model-\d{{5}}-of-\d{{5}}\.safetensors")
FATES = ("uploaded", "copied", "unchanged", "removed", "left")


@dataclass(frozen=True)
class PlannedFile:
    """A file and its fate.

    fate: "uploaded" from here, "copied" on the Hub from the base's repo, "unchanged" in the repo, "removed" from the
        repo, or "left" here.
    size: in bytes.
    """

    name: str
    fate: str
    size: int


@dataclass(frozen=True)
class PushPlan:
    """A checked push, before anything is written.

    folder: the folder to push.
    target: the branch to commit to, or the branch that a new one begins at; None before the repo exists.
    base_copies: copies of files of the base's repo, which the Hub makes.
    new_branch: whether `revision` has to be created.
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
        """Return every file of the folder, and the files that the repo loses, ordered by their fate."""
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
        rows = [f"  {file.fate:<10} {written_bytes(file.size):>10}  {printable_name(file.name)}" for file in files]
        return "\n".join([f"Plan: {where}{state}, {written_bytes(sent)} to upload", *rows])


@dataclass(frozen=True)
class PushResult:
    """Result of a push.

    url: URL of the commit or pull request; of the newest commit when nothing was to be pushed.
    commit: full id of the commit.
    copied: files that the Hub copied from the base's repo.
    uploaded: size in bytes of each uploaded file.
    unchanged: files that the repo contained already.
    removed: weight files of the repo that the folder lacks.
    left: files of the folder that are not of the model and stayed here.
    """

    url: str
    commit: str
    copied: tuple[str, ...]
    uploaded: dict[str, int]
    unchanged: tuple[str, ...]
    removed: tuple[str, ...]
    left: tuple[str, ...]

    def as_dict(self) -> dict:
        """Return the result for machines."""
        return asdict(self)


def push_checkpoint(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    private: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
    include: Iterable[str] = (),
    accept_changes: bool = False,
    say: Say = lambda line: None,
) -> PushResult:
    """Make a repo of the Hub hold a hyper-connection checkpoint, by one commit.

    First the folder must prove complete, undamaged and, as a conversion, compared with its base. The same call
    continues an interrupted push, because the Hub keeps uploaded files.

    folder: folder of a conversion, or of a model saved after training.
    repo_id: `owner/name`; created if missing.
    private: make the repo private; else the owner's settings decide about a new repo, public by default.
    create_pr: open a pull request instead of committing to the branch.
    revision: the branch, by default `main`; created if missing, except for a pull request.
    include: patterns, relative to `folder`, of files to push besides the model's.
    accept_changes: push code, config or companions that have changed since they were written.
    say: called with each line of the report.

    Raises `UnsupportedCheckpointError` for a folder without hyper-connections or with a link out of it, and
    `VerificationError` for a damaged folder. Raises `PushError` when it may not be published so, or the Hub refuses or
    can't be reached.
    """
    plan = plan_push(
        folder,
        repo_id,
        private=private,
        create_pr=create_pr,
        revision=revision,
        include=include,
        accept_changes=accept_changes,
        say=say,
    )
    return carry_out_push(plan, say=say)


def plan_push(
    folder: str | os.PathLike,
    repo_id: str,
    *,
    private: bool = False,
    create_pr: bool = False,
    revision: str | None = None,
    include: Iterable[str] = (),
    accept_changes: bool = False,
    say: Say = lambda line: None,
) -> PushPlan:
    """Plan the fate of each file in a push, and refuse a push that is not allowed; the Hub is only read.

    Arguments and errors as for `push_checkpoint`.
    """
    if repo_id.count("/") != 1:
        raise PushError(f"repo must be owner/name (got {repo_id!r}). Give both.")
    checked = open_checked(Path(folder), include, accept_changes, say)
    checked.name_repo(repo_id)

    from huggingface_hub import HfApi

    api = HfApi(library_name="hf_hyperconn", library_version=hf_hyperconn.__version__)
    with explain_hub_errors(repo_id):
        base, repo = _info(api, checked.base) if checked.base else None, _info(api, repo_id)
        if repo and base and repo.id == base.id and not create_pr and revision in (None, "main"):
            raise PushError(
                f"{repo_id!r} is the base, whose weights would be replaced. Give another repo, or a branch of this "
                f"one with --revision."
            )
        if repo and private and not repo.private:
            raise PushError(f"{repo_id!r} exists and is public. Drop --private, or give another repo.")
        if not (repo.private or repo.gated if repo else private):
            _check_publication(checked, base, repo_id, say)
        target, new_branch = _branch(api, repo_id, revision, make=not create_pr) if repo else (None, False)
        return PushPlan(
            folder=checked,
            repo_id=repo_id,
            target=target,
            base_copies=_copies(api, checked, say) if checked.record and checked.commit else {},
            private=private,
            create_pr=create_pr,
            revision=revision,
            new_branch=new_branch,
            api=api,
        )


def carry_out_push(plan: PushPlan, *, say: Say = lambda line: None) -> PushResult:
    """Carry out a plan; errors as for `push_checkpoint`."""
    api, repo_id, revision = plan.api, plan.repo_id, plan.revision
    with explain_hub_errors(repo_id):
        target, new_branch = plan.target, plan.new_branch
        if target is None:
            api.create_repo(repo_id, private=plan.private or None, exist_ok=True)
            target, new_branch = _branch(api, repo_id, revision, make=not plan.create_pr)
        if new_branch:
            api.create_branch(repo_id, branch=str(revision), exist_ok=True)
            target, _ = _branch(api, repo_id, revision, make=False)
        return _commit(replace(plan, target=target, new_branch=False), say)


def _info(api: "HfApi", repo_id: str) -> "ModelInfo | None":
    """Return the Hub's repo; None when it has none, or hides it from this user."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return api.model_info(repo_id)
    except RepositoryNotFoundError:
        return None


def _branch(api: "HfApi", repo_id: str, revision: str | None, make: bool) -> "tuple[ModelInfo, bool]":
    """Return the newest commit of a branch, with its files, and whether the branch has to be created.

    make: whether a missing branch begins at `main`.
    """
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        return api.model_info(repo_id, revision=revision, files_metadata=True), False
    except RevisionNotFoundError:
        if not make:
            raise
        return api.model_info(repo_id, files_metadata=True), True


def _check_publication(folder: CheckedFolder, base: "ModelInfo | None", repo_id: str, say: Say) -> None:
    """Refuse a public repo that lacks the terms of its base, and warn of a name against the license.

    The card of a conversion of a gated, private or unreadable base must name a license. It must also carry over the
    license and the gating fields (`extra_gated_*`) of the base's own card, as far as the Hub shows that card.

    base: the base's repo; None when the Hub hides it from this user.
    """
    metadata = folder.metadata
    if folder.base and (base is None or base.gated or base.private):
        base_card = base.card_data.to_dict() if base and base.card_data else {}
        lacking = [] if metadata.get("license") else ["license"]
        lacking += [
            name
            for name, value in base_card.items()
            if is_term(name) and not _is_carried_over(folder.base, name, value, metadata)
        ]
        state = "can't be read" if base is None else "is gated" if base.gated else "is private"
        if lacking:
            raise PushError(
                f"the base {folder.base!r} {state}, and {repo_id!r} would be public. Give --private, or a README.md "
                f"whose metadata carries the base's terms over (missing or different: "
                f"{', '.join(dict.fromkeys(lacking))}); `hf-hyperconn card` adds them."
            )
        if base and base.gated:
            say(f"gated base    a card doesn't gate a repo: switch gating on in the settings of {repo_id!r}")
    if problem := name_problem(repo_id.partition("/")[2], metadata):
        say(f"name          {problem}")


def _is_carried_over(base: str, name: str, value: Any, metadata: dict) -> bool:
    """Tell whether a card holds a term of the base's card: the same license, or any value of a gating field."""
    if name not in metadata or not name.startswith("license"):
        return name in metadata
    if metadata[name] == value:
        return True
    # where no copy of the license lies beside the weights, a card links to the base's
    link = rf"https://huggingface\.co/{re.escape(base)}/blob/[^/]+/{re.escape(str(value))}"
    return name == "license_link" and re.fullmatch(link, str(metadata[name])) is not None


def _copies(api: "HfApi", folder: CheckedFolder, say: Say) -> "dict[str, CommitOperationCopy]":
    """Return copies, which the Hub makes, of the base's files at the commit of the conversion."""
    from huggingface_hub import CommitOperationCopy
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    base, commit, record = str(folder.base), str(folder.commit), folder.record or {}
    shards = {shard["source"]: shard["file"] for shard in record["base_shards"] if shard["file"] in folder.names}
    if not shards:
        return {}
    if "src_repo_id" not in CommitOperationCopy.__dataclass_fields__:
        say("base weights  uploaded: this release of huggingface_hub can't have them copied")
        return {}
    try:
        base_files: list[Any] = api.get_paths_info(base, list(shards), revision=commit)
    except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
        say(f"base weights  uploaded: {base!r} can't be read at the commit {commit[:7]}")
        return {}
    copies = {}
    for file in base_files:
        name = shards[file.path]
        # the Hub copies only files in its Xet storage
        is_there = file.lfs and file.xet_hash and file.size == folder.source.files[name]
        if is_there and file.lfs.sha256 == folder.digest(name):
            copies[name] = CommitOperationCopy(
                file.path, name, src_revision=commit, src_repo_id=base, src_repo_type="model"
            )
    if not copies:
        say(f"base weights  uploaded: {base!r} has none of them that the Hub can copy")
    return copies


def _commit(plan: PushPlan, say: Say) -> PushResult:
    """Commit the files that the branch lacks, and remove weights that would be loaded instead."""
    from huggingface_hub import CommitOperationDelete

    target: Any = plan.target
    api, folder, files = plan.api, plan.folder, plan.files
    uploaded, copied, unchanged, removed, left = ([f.name for f in files if f.fate == fate] for fate in FATES)

    def commit(copied: list[str]) -> tuple[str, str]:
        info = api.create_commit(
            target.id,
            [*changes, *(plan.base_copies[name] for name in copied)],
            commit_message=f"Upload with hf-hyperconn {hf_hyperconn.__version__}",
            revision=plan.revision,
            create_pr=plan.create_pr,
            parent_commit=target.sha,
        )
        return info.pr_url or info.commit_url, info.oid

    changes: list[Any] = [*map(folder.addition, uploaded)]
    changes += (CommitOperationDelete(name, is_folder=False) for name in removed)
    if not (changes or copied):
        url, oid = f"{api.endpoint}/{target.id}/commit/{target.sha}", target.sha
    else:
        try:
            url, oid = commit(copied)
        except Exception as error:
            if not (copied and refuses_copies(error, str(folder.base))):
                raise
            say(f"base weights  uploaded: the Hub doesn't copy them from {folder.base!r}")
            changes += map(folder.addition, copied)
            uploaded, copied = sorted([*uploaded, *copied]), []
            url, oid = commit(copied)
    sizes = folder.source.files
    for fate, names in (("copied", copied), ("uploaded", uploaded)):
        say(f"{fate:<14}{len(names)} file(s), {written_bytes(sum(sizes[name] for name in names))}")
    return PushResult(
        url=url,
        commit=oid,
        copied=tuple(copied),
        uploaded={name: sizes[name] for name in uploaded},
        unchanged=tuple(unchanged),
        removed=tuple(removed),
        left=tuple(left),
    )
