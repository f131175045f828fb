"""The model code that a checkpoint brings, judged by what it names itself and not by what this release writes."""

import re

from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.families import Family
from hf_hyperconn.pairs.modules import code_text

from .reading import read_text
from .source import CONFIG, Source

LARGEST = 1_000_000  # bytes of a file of code
REFERENCE = re.compile(r"(\w+)\.(\w+)")
IMPORT = re.compile(r"^\s*from \.(\w+) import", re.MULTILINE)


def code_of(source: Source, config: dict) -> tuple[str, ...]:
    """The files that `auto_map` names, and those beside them that they import, also where one is missing.

    Raises `UnsupportedCheckpointError` when one can't be read.
    """
    found, pending = [], sorted({f"{file}.py" for file, _ in _named(config).values()})
    while pending:
        name = pending.pop(0)
        found.append(name)
        if name in source.files:
            imported = (f"{module}.py" for module in IMPORT.findall(_text(source, name)))
            pending += sorted(set(imported) - {*found, *pending})
    return tuple(found)


def code_fault(source: Source, config: dict, family: Family) -> str | None:
    """What is wrong with the code that a checkpoint brings: classes not named, or files missing."""
    named, expected = _named(config), family.auto_map
    wrong = [auto for auto, (file, name) in named.items() if expected.get(auto, f"{file}.{name}") != f"{file}.{name}"]
    if wrong or not {"AutoConfig", "AutoModel"} <= named.keys() or len(named) != len(config.get("auto_map") or ()):
        return f"{CONFIG} does not name the classes of {family.hc_model_type} in auto_map"
    if absent := [name for name in code_of(source, config) if name not in source.files]:
        return f"the code file {absent[0]} is missing"
    return None


def written_by(config: dict, record: dict | None) -> tuple[str | None, str | None]:
    """The releases of this package and of Transformers that wrote the code of a checkpoint, as far as it tells."""
    if versions := (record or {}).get("versions"):
        return versions.get("hf_hyperconn"), versions.get("transformers")
    return config.get("hc_version"), config.get("transformers_version")


def packaged(name: str) -> str | None:
    """The source of a file of model code as this release writes it; None when it writes none of that name."""
    try:
        return code_text(name)
    except (FileNotFoundError, UnsupportedCheckpointError):
        return None


def _named(config: dict) -> dict[str, tuple[str, str]]:
    """File and class by Auto class, of those that are written as the converter writes them."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, dict):
        return {}
    matches = {auto: REFERENCE.fullmatch(value) for auto, value in auto_map.items() if isinstance(value, str)}
    return {auto: (match[1], match[2]) for auto, match in matches.items() if match}


def _text(source: Source, name: str) -> str:
    try:
        return read_text(source.path(name), LARGEST)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UnsupportedCheckpointError(f"can't read {name} of {source.name!r}: {reason}.") from error
