"""A checkpoint goes to the Hub: one commit, in which the Hub itself copies what it has of the base's weights."""

import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import hf_hyperconn
from hf_hyperconn.errors import PushError, VerificationError
from hf_hyperconn.families import FAMILIES

from .base_card import README
from .card_text import read_card
from .checkpoint import INDEX, WEIGHTS, read_config, read_weights
from .files import leads_out
from .hub_refusals import explained, refuses_copies
from .licences import name_problem
from .plan import RECORD, companions_of, gigabytes
from .publishing_terms import check_terms
from .record import base_on_the_hub, is_verified, read_record
from .source import CONFIG, LocalSource
from .transfer import compare
from .verify import verify_checkpoint

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationCopy, HfApi, ModelInfo
    from huggingface_hub.hf_api import RepoSibling

RESULTS = re.compile(r"\.eval_results/[^/]+\.yaml")
WEIGHT_FILE = re.compile(rf"{re.escape(WEIGHTS)}|{re.escape(INDEX)}|model-\d{{5}}-of-\d{{5}}\.safetensors")

Say = Callable[[str], None]


@dataclass(frozen=True)
class PushResult:
    """What a push did.

    url: of the commit or pull request; of the newest commit when the repo held everything already.
    commit: its full id.
    copied: files that the Hub copied from the base's repo.
    uploaded: size in bytes of each file that was sent from here.
    unchanged: files that the repo held already.
    removed: weight files of the repo that the folder hasn't got.
    """

    url: str
    commit: str
    copied: tuple[str, ...]
    uploaded: dict[str, int]
    unchanged: tuple[str, ...]
    removed: tuple[str, ...]

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
    say: called with a line for each thing worth knowing.

    Raises `UnsupportedCheckpointError` for a folder without hyper-connections, `VerificationError` for a damaged one,
    and `PushError` when it may not be published so, or the Hub refuses or can't be reached.
    """
    if repo_id.count("/") != 1:
        raise PushError(f"the repo {repo_id!r} was given; give owner/name.")
    checked = _open_checked(Path(folder), say)

    from huggingface_hub import HfApi

    api = HfApi(library_name="hf_hyperconn", library_version=hf_hyperconn.__version__)
    with explained(repo_id):
        base, present = checked.base and _info(api, checked.base), _info(api, repo_id)
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
        if not present:
            api.create_repo(repo_id, private=private or None, exist_ok=True)
        target = _branch(api, repo_id, revision, make=not create_pr)
        copies = _copies(api, checked, say) if checked.record and checked.commit else {}
        return _commit(api, target, checked, copies, revision=revision, create_pr=create_pr, say=say)


class _Checked:
    """A folder that is fit for pushing.

    names: its files that are the model.
    record: of its conversion, if it has one.
    base, commit: id and commit of the Hub repo that it was converted from, as far as they are known.
    metadata: of its card; empty when there is none.
    """

    def __init__(self, source: LocalSource, record: dict | None, digests: dict[str, str | None]):
        self.source, self.record, self._digests = source, record, digests
        self.names = _model_files(source)
        self.base, self.commit = base_on_the_hub(read_config(source), record)
        has_card = README in self.names
        self.metadata = read_card(source.path(README), lenient=True).data.to_dict() if has_card else {}

    def digest(self, name: str) -> str:
        """The SHA-256 of a file."""
        from huggingface_hub.utils import tqdm

        if self._digests.get(name) is None:
            path, size = self.source.path(name), self.source.files[name]
            with tqdm(total=size, unit="B", unit_scale=True, desc=f"Reading {name}", disable=None) as bar:
                self._digests[name] = compare(path, path, bar.update)
        return self._digests[name]

    def equals(self, name: str, sibling: "RepoSibling") -> bool:
        """Whether a file of the Hub has the content of ours."""
        from huggingface_hub.utils.sha import git_hash

        if sibling.size != self.source.files[name]:
            return False
        if sibling.lfs:
            return sibling.lfs.sha256 == self.digest(name)
        return sibling.blob_id == git_hash(self.source.path(name).read_bytes())


def _open_checked(folder: Path, say: Say) -> _Checked:
    """The folder, once it is known to be fit for pushing."""
    if not folder.is_dir():
        raise PushError(f"there is no folder '{folder}'. Give that of a conversion or of a saved model.")
    if folder.resolve().name.endswith(".incomplete"):
        raise PushError(f"'{folder}' is an unfinished conversion. Run the same `hf-hyperconn convert` again.")
    report = verify_checkpoint(folder, mode="structure")
    if not report.passed:
        raise VerificationError(f"'{folder}' is not pushed: {report.failure}.")
    source = LocalSource(folder)
    record = read_record(source)
    if record and not report.trained and not is_verified(record):
        raise PushError(
            f"'{folder}' has never been compared with its base (--verify off). Run `hf-hyperconn verify '{folder}' "
            f"--against '{record['base']['model']}'`, then push."
        )
    # verification has just compared an untrained conversion with these
    digests = {s["file"]: s["sha256"] for s in record["base_shards"]} if record and not report.trained else {}
    _check_links(folder, source)
    checked = _Checked(source, record, digests)
    say(report.lines()[0])
    if left := [name for name in sorted(source.files.keys() - checked.names) if "/." not in f"/{name}"]:
        say(f"left here     {', '.join(left[:5])}{f' and {len(left) - 5} more' if len(left) > 5 else ''}")
    if README not in checked.names:
        say(f"no card       `hf-hyperconn card '{folder}'` writes a {README}")
    return checked


def _check_links(folder: Path, source: LocalSource) -> None:
    """Refuse files from outside the folder, but weights, which `convert --link symlink` leaves there."""
    for name in sorted(_model_files(source) - set(read_weights(source).files)):
        if leads_out(folder, folder / name):
            raise PushError(
                f"'{folder / name}' is a link to '{source.path(name)}', outside the folder. Put a file in its place, "
                f"or remove it."
            )


def _model_files(source: LocalSource) -> frozenset[str]:
    """What of a folder is the model: weights, config, code, what goes with them, record, card and its results."""
    code = FAMILIES[read_config(source)["model_type"].removeprefix("hc_")].code
    weights = read_weights(source).files
    index = () if weights == (WEIGHTS,) else (INDEX,)
    others = (name for name in source.files if name in (RECORD, README) or RESULTS.fullmatch(name))
    return frozenset({CONFIG, *weights, *index, *code, *companions_of(source), *others})


def _info(api: "HfApi", repo_id: str) -> "ModelInfo | None":
    """What the Hub says of a repo; None when it has none, or none for this user."""
    from huggingface_hub.errors import RepositoryNotFoundError

    try:
        return api.model_info(repo_id)
    except RepositoryNotFoundError:
        return None


def _branch(api: "HfApi", repo_id: str, revision: str | None, make: bool) -> "ModelInfo":
    """The newest commit of a branch, with its files; `make` says whether a missing branch is made."""
    from huggingface_hub.errors import RevisionNotFoundError

    try:
        return api.model_info(repo_id, revision=revision, files_metadata=True)
    except RevisionNotFoundError:
        if not make:
            raise
        api.create_branch(repo_id, branch=revision, exist_ok=True)
        return api.model_info(repo_id, revision=revision, files_metadata=True)


def _copies(api: "HfApi", checked: _Checked, say: Say) -> "dict[str, CommitOperationCopy]":
    """The files that the base's repo holds at the commit of the conversion, as copies for the Hub to make."""
    from huggingface_hub import CommitOperationCopy
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError

    files, commit = checked.source.files, checked.commit
    shards = {s["source"]: s["file"] for s in checked.record["base_shards"] if s["file"] in checked.names}
    if not shards:
        return {}
    if "src_repo_id" not in CommitOperationCopy.__dataclass_fields__:
        say("base weights  uploaded: this release of huggingface_hub can't have them copied")
        return {}
    try:
        theirs = api.get_paths_info(checked.base, list(shards), revision=commit)
    except (EntryNotFoundError, RepositoryNotFoundError, RevisionNotFoundError):
        say(f"base weights  uploaded: {checked.base!r} can't be read at the commit {commit[:7]}")
        return {}
    copies = {}
    for file in theirs:
        ours = shards[file.path]
        # the Hub copies only what is in its Xet storage
        if file.lfs and file.xet_hash and file.size == files[ours] and file.lfs.sha256 == checked.digest(ours):
            copies[ours] = CommitOperationCopy(
                file.path, ours, src_revision=commit, src_repo_id=checked.base, src_repo_type="model"
            )
    if not copies:
        say(f"base weights  uploaded: {checked.base!r} has none of them that the Hub can copy")
    return copies


def _commit(
    api: "HfApi",
    target: "ModelInfo",
    checked: _Checked,
    copies: "dict[str, CommitOperationCopy]",
    *,
    revision: str | None,
    create_pr: bool,
    say: Say,
) -> PushResult:
    """Commit what the branch lacks, and take away weights that would be loaded instead."""
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete

    held = {sibling.rfilename: sibling for sibling in target.siblings or ()}
    unchanged = {name for name in checked.names if name in held and checked.equals(name, held[name])}
    removed = sorted(name for name in held if WEIGHT_FILE.fullmatch(name) and name not in checked.names)
    copies = {name: copy for name, copy in copies.items() if name not in unchanged}
    uploaded = sorted(checked.names - unchanged - copies.keys())

    def addition(name: str) -> CommitOperationAdd:
        return CommitOperationAdd(name, str(checked.source.path(name)))

    def result(url: str, commit: str) -> PushResult:
        sizes = checked.source.files
        say(f"copied        {len(copies)} file(s), {gigabytes(sum(sizes[name] for name in copies))}")
        say(f"uploaded      {len(uploaded)} file(s), {gigabytes(sum(sizes[name] for name in uploaded))}")
        return PushResult(
            url=url,
            commit=commit,
            copied=tuple(sorted(copies)),
            uploaded={name: sizes[name] for name in uploaded},
            unchanged=tuple(sorted(unchanged)),
            removed=tuple(removed),
        )

    def commit(operations: list) -> PushResult:
        info = api.create_commit(
            target.id,
            operations,
            commit_message=f"Upload with hf-hyperconn {hf_hyperconn.__version__}",
            revision=revision,
            create_pr=create_pr,
            parent_commit=target.sha,
        )
        return result(info.pr_url or info.commit_url, info.oid)

    changes = [*map(addition, uploaded), *(CommitOperationDelete(name, is_folder=False) for name in removed)]
    if not (changes or copies):
        return result(f"{api.endpoint}/{target.id}/commit/{target.sha}", target.sha)
    try:
        return commit([*changes, *copies.values()])
    except Exception as error:
        if not (copies and refuses_copies(error, checked.base)):
            raise
        say(f"base weights  uploaded: the Hub doesn't copy them from {checked.base!r}")
        changes += map(addition, copies)
        uploaded, copies = sorted([*uploaded, *copies]), {}
        return commit(changes)
