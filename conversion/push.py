"""A checkpoint goes to the Hub: one commit, in which the Hub itself copies what it has of the base's weights."""

import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import hf_hyperconn
from hf_hyperconn.errors import PushError

from .cards.licences import name_problem
from .planning.plan import gigabytes
from .publishing.folder import CheckedFolder, Say, open_checked
from .publishing.hub_refusals import explained, refuses_copies
from .publishing.push_plan import FATES, PushPlan, check_terms

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationCopy, HfApi, ModelInfo


@dataclass(frozen=True)
class PushResult:
    """What a push did.

    url: of the commit or pull request; of the newest commit when the repo held everything already.
    commit: its full id.
    copied: files that the Hub copied from the base's repo.
    uploaded: size in bytes of each file that was sent from here.
    unchanged: files that the repo held already.
    removed: weight files of the repo that the folder hasn't got.
    left: files of the folder that are no part of the model and stayed here.
    """

    url: str
    commit: str
    copied: tuple[str, ...]
    uploaded: dict[str, int]
    unchanged: tuple[str, ...]
    removed: tuple[str, ...]
    left: tuple[str, ...]

    def as_dict(self) -> dict:
        """The result for machines."""
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

    Nothing is written before the folder is found complete and undamaged, and a conversion compared with its base. When
    a push was interrupted, the same call goes on from there: the Hub keeps what it has received.

    folder: of a conversion, or of a model saved after training.
    repo_id: `owner/name`; made if it doesn't exist.
    private: make the repo private; otherwise a new one is what its owner's settings say, public by default.
    create_pr: open a pull request instead of committing to the branch.
    revision: the branch, by default `main`; made if it doesn't exist, except for a pull request.
    include: patterns, relative to `folder`, of files to push besides those that a model consists of.
    accept_changes: push though code, config or companions differ from what the conversion, or this package, wrote.
    say: called with a line for each thing worth knowing.

    Raises `UnsupportedCheckpointError` for a folder without hyper-connections or with a link out of it,
    `VerificationError` for a damaged one, and `PushError` when it may not be published so, or the Hub refuses or can't
    be reached.
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
    """Decide what a push does with each file, and refuse what may not be published; the Hub is only read.

    Arguments and errors as for `push_checkpoint`.
    """
    if repo_id.count("/") != 1:
        raise PushError(f"the repo {repo_id!r} was given; give owner/name.")
    checked = open_checked(Path(folder), include, accept_changes, say)

    from huggingface_hub import HfApi

    api = HfApi(library_name="hf_hyperconn", library_version=hf_hyperconn.__version__)
    with explained(repo_id):
        base, present = _info(api, checked.base) if checked.base else None, _info(api, repo_id)
        if present and base and present.id == base.id and not create_pr and revision in (None, "main"):
            raise PushError(
                f"{repo_id!r} is the base, whose weights would be replaced. Give another repo, or a branch of this "
                f"one with --revision."
            )
        if present and private and not present.private:
            raise PushError(f"{repo_id!r} exists and is public. Drop --private, or give another repo.")
        is_open = not (present.private or present.gated if present else private)
        if checked.base and is_open:
            check_terms(checked.base, base, repo_id, checked.metadata, say)
        if is_open and (problem := name_problem(repo_id.partition("/")[2], checked.metadata)):
            say(f"name          {problem}")
        target, new_branch = _branch(api, repo_id, revision, make=not create_pr) if present else (None, False)
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
    """Do what `plan` says; errors as for `push_checkpoint`."""
    api, repo_id, revision = plan.api, plan.repo_id, plan.revision
    with explained(repo_id):
        if plan.target is None:
            api.create_repo(repo_id, private=plan.private or None, exist_ok=True)
            target, new_branch = _branch(api, repo_id, revision, make=not plan.create_pr)
            plan = replace(plan, target=target, new_branch=new_branch)
        if plan.new_branch:
            api.create_branch(repo_id, branch=str(revision), exist_ok=True)
            target, _ = _branch(api, repo_id, revision, make=False)
            plan = replace(plan, target=target, new_branch=False)
        return _commit(plan, say)


def _info(api: "HfApi", repo_id: str) -> "ModelInfo | None":
    """What the Hub says of a repo; None when it has none, or none for this user."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return api.model_info(repo_id)
    except RepositoryNotFoundError:
        return None


def _branch(api: "HfApi", repo_id: str, revision: str | None, make: bool) -> "tuple[ModelInfo, bool]":
    """The newest commit of a branch, with its files, and whether the branch has to be made.

    make: whether one that is missing is to begin where `main` is.
    """
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        return api.model_info(repo_id, revision=revision, files_metadata=True), False
    except RevisionNotFoundError:
        if not make:
            raise
        return api.model_info(repo_id, files_metadata=True), True


def _copies(api: "HfApi", checked: CheckedFolder, say: Say) -> "dict[str, CommitOperationCopy]":
    """The files that the base's repo holds at the commit of the conversion, as copies for the Hub to make."""
    from huggingface_hub import CommitOperationCopy
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    files, base, commit, record = checked.source.files, checked.base, checked.commit, checked.record
    assert base is not None
    assert commit is not None
    assert record is not None
    shards = {s["source"]: s["file"] for s in record["base_shards"] if s["file"] in checked.names}
    if not shards:
        return {}
    if "src_repo_id" not in CommitOperationCopy.__dataclass_fields__:
        say("base weights  uploaded: this release of huggingface_hub can't have them copied")
        return {}
    try:
        theirs: list[Any] = api.get_paths_info(base, list(shards), revision=commit)
    except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
        say(f"base weights  uploaded: {base!r} can't be read at the commit {commit[:7]}")
        return {}
    copies = {}
    for file in theirs:
        ours = shards[file.path]
        # the Hub copies only what is in its Xet storage
        if file.lfs and file.xet_hash and file.size == files[ours] and file.lfs.sha256 == checked.digest(ours):
            copies[ours] = CommitOperationCopy(
                file.path, ours, src_revision=commit, src_repo_id=base, src_repo_type="model"
            )
    if not copies:
        say(f"base weights  uploaded: {base!r} has none of them that the Hub can copy")
    return copies


def _commit(plan: PushPlan, say: Say) -> PushResult:
    """Commit what the branch lacks, and take away weights that would be loaded instead."""
    from huggingface_hub import CommitOperationDelete

    target: Any = plan.target
    api, checked, files = plan.api, plan.folder, plan.files
    uploaded, copied, unchanged, removed, left = ([f.name for f in files if f.fate == fate] for fate in FATES)

    def result(url: str, commit: str) -> PushResult:
        sizes = checked.source.files
        say(f"copied        {len(copied)} file(s), {gigabytes(sum(sizes[name] for name in copied))}")
        say(f"uploaded      {len(uploaded)} file(s), {gigabytes(sum(sizes[name] for name in uploaded))}")
        return PushResult(
            url=url,
            commit=commit,
            copied=tuple(copied),
            uploaded={name: sizes[name] for name in uploaded},
            unchanged=tuple(unchanged),
            removed=tuple(removed),
            left=tuple(left),
        )

    def commit(operations: list) -> PushResult:
        info = api.create_commit(
            target.id,
            operations,
            commit_message=f"Upload with hf-hyperconn {hf_hyperconn.__version__}",
            revision=plan.revision,
            create_pr=plan.create_pr,
            parent_commit=target.sha,
        )
        return result(info.pr_url or info.commit_url, info.oid)

    changes = [*map(checked.addition, uploaded), *(CommitOperationDelete(name, is_folder=False) for name in removed)]
    if not (changes or copied):
        return result(f"{api.endpoint}/{target.id}/commit/{target.sha}", target.sha)
    try:
        return commit([*changes, *(plan.base_copies[name] for name in copied)])
    except Exception as error:
        if not (copied and refuses_copies(error, str(checked.base))):
            raise
        say(f"base weights  uploaded: the Hub doesn't copy them from {checked.base!r}")
        changes += map(checked.addition, copied)
        uploaded, copied = sorted([*uploaded, *copied]), []
        return commit(changes)
