"""A folder that is fit for pushing: its files to upload, by the checked bytes."""

import hashlib
import os
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING

from hf_hyperconn.errors import PushError, VerificationError

from ..checkpoint.checkpoint import Checkpoint, open_conversion
from ..checkpoint.checkpoint_files import INDEX, WEIGHTS, refuse_links_out
from ..checkpoint.model_code import code_files
from ..checkpoint.readme import README, read_card, with_repo_name
from ..checkpoint.record import base_on_the_hub, is_verified, shards_without_digest
from ..checkpoint.repository_files import NOT_FOR_A_REPO, belongs, belongs_to_module, may_be_added
from ..checkpoint.source import CONFIG, Source
from ..files.writing import file_digest
from ..planning.companions import folders_of_modules
from ..terminal import name_some
from ..verify import VerificationReport, verify_checkpoint
from ..verify.changed_files import find_changes

if TYPE_CHECKING:
    from huggingface_hub import CommitOperationAdd
    from huggingface_hub.hf_api import RepoSibling

LARGEST_HELD = 2**26  # bytes of a file that is kept in memory, so that the checked bytes go up

Say = Callable[[str], None]


class CheckedFolder:
    """A folder that is fit for pushing.

    names: its files to upload.
    left: its files that stay here, without files of git and of downloads.
    base, commit: id and commit of the base on the Hub, as far as they are known.
    metadata: the card's metadata; empty without a card.
    """

    def __init__(self, checkpoint: Checkpoint, include: Iterable[str], trained: bool):
        self.checkpoint, self.source, self.record = checkpoint, checkpoint.source, checkpoint.record
        self._contents: dict = {}
        # verification has just compared the weights of an untrained conversion with these
        shards = self.record["base_shards"] if self.record and not trained else ()
        self._digests = {shard["file"]: shard["sha256"] for shard in shards if shard["sha256"]}
        self.weights = frozenset(checkpoint.weights.files)
        self.names = _names(checkpoint) | _included(self.source, include)
        self.left = sorted(n for n in self.source.files.keys() - self.names if not NOT_FOR_A_REPO.fullmatch(n))
        self.base, self.commit = base_on_the_hub(checkpoint.config, self.record)
        has_card = README in self.names
        self.metadata = read_card(self.source.path(README), lenient=True).data.to_dict() if has_card else {}

    def digest(self, name: str) -> str:
        """Return the SHA-256 of a file."""
        from huggingface_hub.utils import tqdm

        if name not in self._digests:
            path, size = self.source.path(name), self.source.files[name]
            if name in self.weights or size > LARGEST_HELD:
                with tqdm(
                    total=size, unit="B", unit_scale=True, desc=f"Reading {printable_name(name)}", disable=None
                ) as bar:
                    self._digests[name] = file_digest(path, bar.update)
            else:
                self._contents[name] = path.read_bytes()
                self._digests[name] = hashlib.sha256(self._contents[name]).hexdigest()
        return self._digests[name]

    def name_repo(self, repo_id: str) -> None:
        """Name the repo in the quick start of the uploaded card; the folder's own card stays unchanged."""
        if README in self.names:
            self.digest(README)
            content = with_repo_name(self._contents[README].decode(), repo_id).encode()
            self._contents[README], self._digests[README] = content, hashlib.sha256(content).hexdigest()
            self.source.files[README] = len(content)

    def equals(self, name: str, sibling: "RepoSibling") -> bool:
        """Tell whether a file of the Hub has the same content as the folder's file."""
        from huggingface_hub.utils.sha import git_hash

        if sibling.size != self.source.files[name]:
            return False
        if sibling.lfs:
            return sibling.lfs.sha256 == self.digest(name)
        self.digest(name)
        return sibling.blob_id == git_hash(self._contents.get(name) or self.source.path(name).read_bytes())

    def addition(self, name: str) -> "CommitOperationAdd":
        """Return the operation that uploads a file. Raises `PushError` when it has changed since it was checked."""
        from huggingface_hub import CommitOperationAdd

        if name not in self.weights:
            self.digest(name)
        addition = CommitOperationAdd(name, self._contents.get(name, str(self.source.path(name))))
        uploaded = addition.upload_info.sha256.hex()
        if uploaded != self._digests.get(name, uploaded):
            raise PushError(f"{name} of {self.source.name!r} was changed while it was being pushed. Push it again.")
        return addition


def open_checked(folder: Path, include: Iterable[str], accept_changes: bool, say: Say) -> CheckedFolder:
    """Open a folder, and refuse one that is not fit for pushing.

    include: patterns of files to push besides the model's.
    accept_changes: whether to push changed code, config and companions.

    Raises as `push_checkpoint` does.
    """
    if not os.path.isdir(folder):
        raise PushError(f"there is no folder '{folder}'. Give the folder of a conversion or of a saved model.")
    if Path(os.path.realpath(folder)).name.endswith(".incomplete"):
        raise PushError(f"'{folder}' is an unfinished conversion. Run the same `hf-hyperconn convert` again.")
    report = verify_checkpoint(folder, mode="structure", accept_changes=True)
    if not report.passed:
        raise VerificationError(f"'{folder}' is not pushed: {report.failure}.")
    checkpoint = open_conversion(folder)
    try:
        checked = CheckedFolder(checkpoint, include, report.trained is not False)
        # `convert --link symlink` leaves weights where they are
        refuse_links_out(checkpoint.source, sorted(checked.names - checked.weights))
        _check_changes(folder, checked, report, accept_changes, say)
    except OSError as error:
        raise PushError(f"can't read '{error.filename}': {error.strerror}. Allow that, and push again.") from error
    record = checked.record
    if record and not report.trained and (not is_verified(record) or shards_without_digest(record)):
        reason = "no digest was recorded of its base weights" if is_verified(record) else "--verify off"
        raise PushError(
            f"'{folder}' has never been compared with its base ({reason}). Run `hf-hyperconn verify '{folder}' "
            f"--against '{record['base']['model']}'`, then push."
        )
    say(report.lines()[0])
    if left := checked.left:
        say(f"left here     {name_some(tuple(map(printable_name, left)))} (--dry-run lists all, --include adds)")
    if README not in checked.names:
        say(f"no card       `hf-hyperconn card '{folder}'` writes a {README}")
    return checked


def printable_name(name: str) -> str:
    """Return the name of a file for people, in characters that a terminal prints."""
    return name if name.isprintable() else ascii(name)


def _names(checkpoint: Checkpoint) -> frozenset[str]:
    """Return the files of the model: config, weights, code, and their companions."""
    source, weights, code = checkpoint.source, checkpoint.weights.files, code_files(checkpoint)
    index = () if weights == (WEIGHTS,) else (INDEX,)
    files = (checkpoint.record or {}).get("files") or {}
    recorded = (name for name in files if name.endswith(".py") and name in source.files)
    modules = folders_of_modules(source)
    of_modules = (name for name in source.files if name.startswith(modules) and belongs_to_module(name))
    return frozenset({CONFIG, *weights, *index, *code, *recorded, *of_modules, *filter(belongs, source.files)})


def _included(source: Source, patterns: Iterable[str]) -> frozenset[str]:
    """Return the files that patterns match. Raises `PushError` for a pattern without a match."""
    names = set()
    for pattern in patterns:
        parts = Path(pattern).parts
        matching = {name for name in source.files if _matches(name.split("/"), parts) and may_be_added(name)}
        if not matching:
            raise PushError(
                f"--include {pattern!r} names no file of '{source.name}' that can be added. Give a path or a pattern "
                f"relative to it, such as 'notes/*.md'; other weights, adapters and hidden folders of git stay."
            )
        names |= matching
    return frozenset(names)


def _matches(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Tell whether a path matches a pattern as in `glob`, which would follow links to folders, too."""
    if not pattern:
        return not names
    if pattern[0] == "**":
        rest = pattern[1:]
        passed = next((place for place, name in enumerate(names) if name.startswith(".")), len(names))
        return any(_matches(names[place:], rest) for place in range(passed + 1))
    if not names or (names[0].startswith(".") and not pattern[0].startswith(".")):
        return False
    return fnmatchcase(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def _check_changes(
    folder: Path, checked: CheckedFolder, report: VerificationReport, accept_changes: bool, say: Say
) -> None:
    """Refuse files that differ from the written ones, by the bytes to upload, unless that is accepted."""
    changes, notes = find_changes(checked.checkpoint, as_converted=report.as_converted, digest_of=checked.digest)
    changes = tuple(change for change in changes if change.name in checked.names)
    if changes and not accept_changes:
        raise PushError(
            f"'{folder}' is not as it was written: {'; '.join(map(str, changes))}. Check that, and publish it as "
            f"it is with --accept-changes."
        )
    for change in changes:
        say(f"changed       {change}")
    for note in notes:
        say(f"note          {note}")
