"""The modules of sentence-transformers in a checkpoint: their folders, and code that they name."""

from posixpath import isabs, normpath

from hf_hyperconn.errors import UnsupportedCheckpointError

from .checkpoint_files import read_any_json
from .source import Source

MODULES = "modules.json"


def folders_of_modules(source: Source) -> tuple[str, ...]:
    """The folders that modules.json names, each with a "/" at its end, but its own.

    Raises `UnsupportedCheckpointError` when it leads out, or is not what sentence-transformers writes.
    """
    folders = []
    for path, _ in _modules(source):
        folder = normpath(path)
        if isabs(folder) or ".." in folder.split("/"):
            raise UnsupportedCheckpointError(
                f"{MODULES} of {source.name!r} names {path!r:.60}, a path outside it. Do not trust it."
            )
        folders.append(f"{folder}/")
    return tuple(folder for folder in folders if folder != "./")


def code_of_modules(source: Source) -> str | None:
    """The first class in modules.json whose code lies in the checkpoint, or in a repo of the Hub."""
    for _, name in _modules(source):
        module, _, _ = name.rpartition(".")
        if "--" in name or f"{module.replace('.', '/')}.py" in source.files:
            return name
    return None


def _modules(source: Source) -> list[tuple[str, str]]:
    """Path and class of each module."""
    if MODULES not in source.files:
        return []
    modules = read_any_json(source, MODULES)
    found = [_path_and_class(each) for each in modules] if isinstance(modules, list) else [None]
    if None in found:
        raise UnsupportedCheckpointError(
            f"{MODULES} of {source.name!r} is no list of modules with path and type. Download it again."
        )
    return [each for each in found if each is not None]


def _path_and_class(module: object) -> tuple[str, str] | None:
    match module:
        case {"path": str(path), "type": str(name)}:
            return path, name
    return None
