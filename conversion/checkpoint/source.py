"""The source of a checkpoint's files: a local folder or a repo of the Hub."""

import errno
import logging
import os
import re
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_hyperconn.errors import UnsupportedCheckpointError

from ..files.reading import LARGEST_JSON, TensorInfo, check_offsets, read_header, tensor_info

logger = logging.getLogger(__name__)

CONFIG = "config.json"
RECORD = "hyperconn_conversion.json"
GENERATE = "custom_generate/generate.py"  # run by `generate`, of a folder whose code is trusted
REPO_ID = re.compile(r"\w[\w.-]*(/\w[\w.-]*)?")
COMMIT = re.compile("[0-9a-f]{40}")
# of this machine, not of the way to the Hub
LOCAL_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ENOTDIR)


class Source(ABC):
    """A checkpoint to read from.

    name: as the user gave it.
    commit: the full commit of a Hub repo; None for a folder.
    files: size in bytes by path inside the checkpoint, "/" between folders.
    sha256: of the files whose digest is known without reading them.
    """

    name: str
    commit: str | None
    files: dict[str, int]
    sha256: dict[str, str]

    @abstractmethod
    def folder(self, names: Iterable[str]) -> Path:
        """Return a local folder with the files `names`, downloaded first if needed."""

    @abstractmethod
    def header(self, name: str) -> dict[str, TensorInfo]:
        """Return the tensors of a safetensors file, without downloading its data."""

    @abstractmethod
    def to_download(self, names: list[str]) -> tuple[Path, int]:
        """Return the folder of downloads, and how many bytes of the files `names` are not there yet."""

    def path(self, name: str) -> Path:
        """Return a local path of one file, downloaded first if needed; never a symbolic link."""
        return Path(os.path.realpath(self.folder([name]) / name))


class LocalSource(Source):
    """The regular files of a folder; pipes, devices and broken links are left out.

    Raises `UnsupportedCheckpointError` when the folder can't be read in full, or a name in it is not UTF-8.
    """

    def __init__(self, folder: Path, name: str | None = None, commit: str | None = None):
        self._folder, self.name, self.commit, self.sha256 = folder, name or str(folder), commit, {}
        self.files = dict(_regular_files(folder))

    def folder(self, names: Iterable[str]) -> Path:
        return self._folder

    def header(self, name: str) -> dict[str, TensorInfo]:
        return read_header(self._folder / name)

    def to_download(self, names: list[str]) -> tuple[Path, int]:
        return self._folder, 0


class HubSource(Source):
    """A repo of the Hub at one commit.

    Every method raises `UnsupportedCheckpointError` when the Hub refuses or can't be reached.
    """

    def __init__(self, repo_id: str, revision: str | None):
        from huggingface_hub import HfApi

        self.name, self._api = repo_id, HfApi(library_name="hf_hyperconn")
        with _hub_errors(repo_id, revision):
            info = self._api.model_info(repo_id, revision=revision, files_metadata=True)
            self.commit = info.sha
            siblings = info.siblings or []
            self.files = {sibling.rfilename: sibling.size or 0 for sibling in siblings}
            self.sha256 = {sibling.rfilename: sibling.lfs.sha256 for sibling in siblings if sibling.lfs}
            if 0 < self.files.get(CONFIG, 0) <= LARGEST_JSON:
                # by its revision, so that the cache knows the commit when the Hub can't be reached
                self._api.hf_hub_download(repo_id, CONFIG, revision=revision)

    def folder(self, names: Iterable[str]) -> Path:
        with _hub_errors(self.name, self.commit):
            for name in names:
                path = Path(self._api.hf_hub_download(self.name, name, revision=self.commit))
        return path.parents[name.count("/")]

    def header(self, name: str) -> dict[str, TensorInfo]:
        try:
            with _hub_errors(self.name, self.commit):
                metadata = self._api.parse_safetensors_file_metadata(self.name, name, revision=self.commit)
            tensors = {key: tensor_info(info.dtype, info.shape, name) for key, info in metadata.tensors.items()}
            offsets = {key: info.data_offsets for key, info in metadata.tensors.items()}
            check_offsets(tensors, offsets, self.files[name])
            return tensors
        except UnsupportedCheckpointError:
            raise
        except (ValueError, TypeError, AttributeError, RecursionError) as error:  # by a file without a header
            raise UnsupportedCheckpointError(
                f"{name} of {self.name!r} is not a safetensors file ({error}). Do not trust this checkpoint."
            ) from error

    def to_download(self, names: list[str]) -> tuple[Path, int]:
        from huggingface_hub import constants, try_to_load_from_cache

        cache = Path(constants.HF_HUB_CACHE)
        while not cache.is_dir():
            cache = cache.parent
        held = [name for name in names if try_to_load_from_cache(self.name, name, revision=self.commit)]
        return cache, sum(self.files[name] for name in names if name not in held)


class _Unreachable(UnsupportedCheckpointError):
    """The Hub can't be reached."""


def open_source(model: str, revision: str | None = None) -> Source:
    """Open the source behind MODEL, a local folder or a Hub id.

    revision: branch, tag or commit of a Hub repo.

    Raises `UnsupportedCheckpointError` when there is no such folder or repo, or it can't be reached.
    """
    check_is_text(model)
    try:
        mode = os.stat(model).st_mode
    except (FileNotFoundError, NotADirectoryError):
        mode = None
    except OSError as error:
        raise UnsupportedCheckpointError(
            f"can't read {model!r}: {error.strerror}. Give another folder, or a Hub id."
        ) from error
    if mode is not None and stat.S_ISDIR(mode):
        if revision is not None:
            raise UnsupportedCheckpointError(
                f"{model!r} is a folder and has no revision {revision!r}; drop --revision."
            )
        return LocalSource(Path(model))
    if mode is not None:
        if model.endswith(".gguf"):
            raise UnsupportedCheckpointError(
                f"MODEL must be a folder of safetensors (got the file {model!r}). Load it with Transformers "
                f"(gguf_file=...), save it with save_pretrained, and convert the result."
            )
        raise UnsupportedCheckpointError(f"{model!r} is a file; give the folder of a checkpoint, or a Hub id.")
    if not REPO_ID.fullmatch(model):
        raise UnsupportedCheckpointError(
            f"there is no folder {model!r}, nor can it be a Hub id (owner/name). Check the path."
        )
    try:
        return HubSource(model, revision)
    except _Unreachable as error:
        if (cached := _cached(model, revision)) is None:
            raise
        reason = type(error.__cause__).__name__
        logger.warning(f"the Hub did not deliver {model!r} ({reason}). Commit {cached.commit} of the cache is used.")
        return cached


def fetch(repo_id: str, name: str, revision: str | None) -> Path | None:
    """Return the path of one file of a Hub repo, cached or downloaded; None when the repo does not have it.

    Raises `UnsupportedCheckpointError` when the Hub refuses or can't be reached.
    """
    from huggingface_hub import errors, hf_hub_download

    with _hub_errors(repo_id, revision):
        try:
            return Path(hf_hub_download(repo_id, name, revision=revision))
        except errors.RemoteEntryNotFoundError:
            return None


def check_is_text(name: str) -> None:
    """Raise `UnsupportedCheckpointError` for the name of a file or folder that is not UTF-8."""
    try:
        name.encode()
    except UnicodeEncodeError as error:
        raise UnsupportedCheckpointError(
            f"the name {name!r} is not UTF-8, so it can't be recorded. Rename it."
        ) from error


def _regular_files(folder: Path) -> Iterator[tuple[str, int]]:
    """Yield path inside a folder and size of each of its files, without the file system's own."""

    def refuse(error: OSError) -> None:
        if Path(str(error.filename)) == folder / "lost+found":  # of a file system, which only root may read
            return
        raise UnsupportedCheckpointError(
            f"can't read '{error.filename}': {error.strerror}. Allow that, or give another folder."
        ) from error

    for place, _, names in os.walk(folder, onerror=refuse):
        for name in names:
            path = Path(place, name)
            try:
                status = path.stat()
            except OSError as error:
                if not os.path.islink(path):  # to nothing, to itself or to where nobody may look
                    refuse(error)
                continue
            if stat.S_ISREG(status.st_mode):
                inside = path.relative_to(folder).as_posix()
                check_is_text(inside)
                yield inside, status.st_size


def _cached(repo_id: str, revision: str | None) -> LocalSource | None:
    """Return the source of a repo in the local cache, if it has weights."""
    from huggingface_hub import snapshot_download

    try:
        folder = Path(snapshot_download(repo_id, revision=revision, local_files_only=True))
    except OSError:
        return None
    source = LocalSource(folder, name=repo_id, commit=folder.name)
    return source if any(name.endswith(".safetensors") for name in source.files) else None


@contextmanager
def _hub_errors(repo_id: str, revision: str | None):
    """Turn errors of huggingface_hub into errors with a remedy."""
    from huggingface_hub import constants, errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise UnsupportedCheckpointError(
            f"access to {repo_id!r} is gated. Ask for it on the model's page, then log in with `hf auth login`."
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UnsupportedCheckpointError(f"{repo_id!r} has no revision {revision!r}. Check --revision.") from error
    except errors.RepositoryNotFoundError as error:
        raise UnsupportedCheckpointError(
            f"there is no folder {repo_id!r} and no such repo on the Hub. Check the name; if it is private, log in "
            f"with `hf auth login`."
        ) from error
    except (errors.SafetensorsParsingError, errors.NotASafetensorsRepoError) as error:
        raise UnsupportedCheckpointError(
            f"a weight file of {repo_id!r} is not a safetensors file: {error}. Give another."
        ) from error
    except errors.HFValidationError as error:
        raise UnsupportedCheckpointError(
            f"there is no folder {repo_id!r}, nor can it be a Hub id: {error}. Check it."
        ) from error
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", "an error")
        raise _Unreachable(
            f"the Hub answered {status} for {repo_id!r}. Try again later, or give a local folder."
        ) from error
    except (errors.HTTPError, OSError) as error:  # the HTTP client differs between releases of huggingface_hub
        if isinstance(error, OSError) and error.filename == constants.HF_TOKEN_PATH:
            raise _Unreachable(
                f"the token for the Hub, '{error.filename}', can't be read: {error.strerror}. Allow that, or set "
                f"HF_TOKEN_PATH to another file."
            ) from error
        if isinstance(error, OSError) and error.errno in LOCAL_ERRORS:
            raise UnsupportedCheckpointError(
                f"{repo_id!r} can't be kept in the cache of the Hub, '{constants.HF_HUB_CACHE}': {error.strerror}. "
                f"Make room there, set HF_HOME to another folder, or give a local folder."
            ) from error
        raise _Unreachable(
            f"{repo_id!r} is not a local folder, and the Hub can't be reached for it ({type(error).__name__}). "
            f"Go online, or give a local folder."
        ) from error
