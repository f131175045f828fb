"""The model code of a checkpoint, judged by its own names instead of this release's code."""

import ast
import re
from collections.abc import Iterable, Iterator

from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.families.modules import code_text
from hf_hyperconn.families.reading.source_files import FunctionSource as Function
from hf_hyperconn.families.reading.source_files import release
from hf_hyperconn.models.layer_source import CutFrom, digest_of_functions
from hf_hyperconn.models.shipped_code import code_of as imported
from hf_hyperconn.models.shipped_code import source_for

from ..files.reading import read_text
from .checkpoint import Checkpoint
from .source import CONFIG, Source

LARGEST_CODE = 1_000_000  # bytes of a file
REFERENCE = re.compile(r"(\w+)\.(\w+)")


def code_files(checkpoint: Checkpoint) -> tuple[str, ...]:
    """Return the files that `auto_map` names, and their imports, missing ones included.

    Raises `UnsupportedCheckpointError` when one can't be read.
    """
    source, named = checkpoint.source, _references(checkpoint.raw_config)

    def read(module: str) -> str:
        return _text(source, f"{module}.py") if f"{module}.py" in source.files else ""

    return tuple(f"{module}.py" for module in imported(read, {file for file, _ in named.values()}))


def size_of_code(checkpoint: Checkpoint) -> tuple[int, int]:
    """Count the files of code of a checkpoint, and their lines that are not empty.

    Raises `UnsupportedCheckpointError` when one can't be read.
    """
    source = checkpoint.source
    texts = [_text(source, name) for name in code_files(checkpoint) if name in source.files]
    return len(texts), sum(bool(line.strip()) for text in texts for line in text.splitlines())


def code_fault(checkpoint: Checkpoint) -> str | None:
    """Find a fault of the code of a checkpoint: classes not named, a file missing, or branches of other layers."""
    config, family = checkpoint.raw_config, checkpoint.family
    named, expected = _references(config), family.auto_map
    wrong = [auto for auto, (file, name) in named.items() if expected.get(auto, f"{file}.{name}") != f"{file}.{name}"]
    if wrong or not {"AutoConfig", "AutoModel"} <= named.keys() or len(named) != len(config.get("auto_map") or ()):
        return f"{CONFIG} does not name the classes of {family.hc_model_type} in auto_map"
    if absent := [name for name in code_files(checkpoint) if name not in checkpoint.source.files]:
        return f"the code file {absent[0]} is missing. Run `hf-hyperconn refresh`"
    return cut_fault(cuts_of(checkpoint))


def cuts_of(checkpoint: Checkpoint) -> tuple[CutFrom, ...]:
    """Return the sources of branches that are written in the code of a checkpoint."""
    source, family = checkpoint.source, checkpoint.family
    names = (*family.files, *(family.part.files if family.part else ()))
    texts = [_text(source, name) for name in names if name in source.files and name.startswith("modeling_")]
    return tuple(cut for text in texts if "CutFrom(" in text for cut in _cuts(text))


def cut_fault(cuts: Iterable[CutFrom]) -> str | None:
    """Find a source of branches that differs in the installed Transformers."""
    for cut in cuts:
        functions = [function for name in cut.functions if (function := Function.named(name)) is not None]
        same = digest_of_functions([(function.node, function.layers) for function in functions])
        if len(functions) != len(cut.functions) or same != cut.same:
            return (
                f"the code was cut from Transformers {cut.release}, and {cut.functions[0].partition(':')[2]} of the "
                f"installed {release()} is another. Install transformers=={cut.release}, or run `hf-hyperconn refresh`"
            )
    return None


def _cuts(text: str) -> Iterator[CutFrom]:
    """Yield every `cut_from = CutFrom(...)` in a file of code."""
    try:
        nodes = [*ast.walk(ast.parse(text))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    for node in nodes:
        match node:
            case ast.Assign([ast.Name("cut_from")], ast.Call(ast.Name("CutFrom"), arguments, keywords)):
                try:
                    named = {str(keyword.arg): ast.literal_eval(keyword.value) for keyword in keywords}
                    cut = CutFrom(*map(ast.literal_eval, arguments), **named)
                    is_written_so = all(isinstance(name, str) for name in (cut.release, cut.same, *cut.functions))
                except (TypeError, ValueError):
                    continue
                if is_written_so:
                    yield cut


def releases_of_code(checkpoint: Checkpoint) -> tuple[str | None, str | None]:
    """Return the releases of this package and of Transformers that wrote the code; None for an unknown one."""
    if versions := (checkpoint.record or {}).get("versions"):
        return versions.get("hf_hyperconn"), versions.get("transformers")
    return checkpoint.config.get("hc_version"), checkpoint.config.get("transformers_version")


def code_of_this_release(name: str, config: dict) -> str | None:
    """Return a file of model code as this release writes it for a config; None without such a file."""
    try:
        return source_for(config, name.removesuffix(".py"), code_text(name))
    except (FileNotFoundError, UnsupportedCheckpointError):
        return None


def _references(config: dict) -> dict[str, tuple[str, str]]:
    """Return file and class by Auto class, for entries as the converter writes them."""
    auto_map = config.get("auto_map")
    if not isinstance(auto_map, dict):
        return {}
    matches = {auto: REFERENCE.fullmatch(value) for auto, value in auto_map.items() if isinstance(value, str)}
    return {auto: (match[1], match[2]) for auto, match in matches.items() if match}


def _text(source: Source, name: str) -> str:
    try:
        return read_text(source.path(name), LARGEST_CODE)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UnsupportedCheckpointError(f"can't read {name} of {source.name!r}: {reason}. Fix that.") from error
