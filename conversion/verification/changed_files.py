"""Files that are not as the conversion or this package wrote them, and fields of a config that are not the base's."""

import hashlib
import json
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass

import hf_hyperconn
from hf_hyperconn.families.family import Family, usual_names
from hf_hyperconn.families.reading.source_files import release
from hf_hyperconn.kinds import FIELDS, setting
from hf_hyperconn.models.connection_fields import one_of

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.checkpoint_files import INDEX
from ..checkpoint.fields import exact
from ..checkpoint.model_code import code_of, packaged, written_by
from ..checkpoint.repository_files import NOT_FOR_A_REPO
from ..checkpoint.source import CONFIG, GENERATE, Source
from ..terminal import named

PACKAGE = f"hf_hyperconn {hf_hyperconn.__version__}"

# fields of a config that a conversion sets itself
SET = (
    *(*FIELDS, "model_type", "architectures", "auto_map", "_name_or_path"),
    *("hc_base_model", "hc_base_commit", "hc_format", "hc_version"),
)
PASSING = ("transformers_version", "dtype", "use_cache")  # what is not the model's
SHOWN = 60  # characters of a value, in a message


@dataclass(frozen=True)
class FileChange:
    """A file that is not as it was written.

    name: its path in the checkpoint.
    finding: what differs, to be read after the name.
    fails: whether a conversion with this file is no longer the one that was made.
    """

    name: str
    finding: str
    fails: bool

    def __str__(self) -> str:
        return f"{self.name} {self.finding}"


def find_changes(
    checkpoint: Checkpoint, *, as_converted: bool, digest_of: Callable[[str], str]
) -> tuple[tuple[FileChange, ...], tuple[str, ...]]:
    """Compare code, config, index and companions with what was recorded of them, and code with this package's.

    as_converted: whether nobody has trained the checkpoint since its conversion. Of one that was trained and saved,
        config, index and tokenizer are Transformers' own, and code alone can be judged.
    digest_of: the SHA-256 of a file of the checkpoint.

    Returns the files that changed, and what else is worth knowing of files.
    """
    source, recorded = checkpoint.source, (checkpoint.record or {}).get("files") or {}
    code = code_of(checkpoint)
    ours = {name: packaged(name, checkpoint.config) for name in code}
    changes, notes = _code(source, ours, written_by(checkpoint), recorded, as_converted, digest_of)
    for name, expected in recorded.items():
        if name in code or (name in (CONFIG, INDEX) and not as_converted):
            continue
        if name not in source.files:
            notes.append(f"{name}, which the conversion copied, is missing")
        elif digest_of(name) != expected:
            change = FileChange(name, "is not what the conversion wrote", name in (CONFIG, INDEX))
            changes.append(change) if as_converted else notes.append(str(change))
    if GENERATE in source.files:
        change = FileChange(GENERATE, "is code that `generate` would run", True)
        changes.append(change) if as_converted else notes.append(str(change))
    notes += _other_code({*source.files} - {*code, *recorded, GENERATE})
    return tuple(changes), tuple(notes)


def config_differences(checkpoint: Checkpoint, base: dict) -> list[str]:
    """What the config of a checkpoint says of the model otherwise than its base's config.json.

    Where they aren't the same, field by field, both are read as Transformers reads them: a newer release, or saving,
    adds fields, renames them and leaves out those that have their defaults.
    """
    config, family = checkpoint.config, checkpoint.family
    if found := _differences(config, base, family):
        from transformers import CONFIG_MAPPING

        hc_class = getattr(family.configuration_module(), f"HC{family.name}Config")
        try:
            ours = hc_class.from_dict(deepcopy(config)).to_dict()
            theirs = CONFIG_MAPPING[family.base_model_type].from_dict(deepcopy(base)).to_dict()
            lasting = {field: value for field, value in theirs.items() if field not in PASSING}
            found = _differences(ours, lasting, family)
        except Exception:  # whatever a class makes of values that Transformers can't have written
            pass
    readouts, readout = exact("hc_readout"), setting(config, "hc_readout")
    return found + [f"hc_readout is {readout!r}, of a conversion {one_of(readouts)}"] * (readout not in readouts)


def _differences(config: dict, base: dict, family: Family) -> list[str]:
    """The fields of a base that a config has otherwise, but for those that a conversion sets.

    Of a model with its layers in another one, as in a language model, the fields of that one stand for it.
    """
    config, base = usual_names(config), usual_names({**base, "model_type": family.model_type})
    if isinstance(base.get(family.part_field), dict):
        base.pop(family.part_field)
    found = []
    for field, value in base.items():
        if field not in SET and field not in config:
            found.append(f"{field} is missing, in the base {_shown(value)}")
        elif field not in SET and _json(config[field]) != _json(value):
            found.append(f"{field} is {_shown(config[field])}, in the base {_shown(value)}")
    return found


def _code(
    source: Source,
    code: dict[str, str | None],
    writers: tuple[str | None, str | None],
    recorded: dict[str, str],
    as_converted: bool,
    digest_of: Callable[[str], str],
) -> tuple[list[FileChange], list[str]]:
    """`find_changes` of the files of model code, which `writers` wrote.

    code: the source of each as this package writes it; None where it writes no such file.
    """
    changes, of_release = [], []
    is_of_another = None not in writers and writers != (hf_hyperconn.__version__, release())
    for name, text in code.items():
        if name not in source.files:
            continue
        found, ours = digest_of(name), text and hashlib.sha256(text.encode()).hexdigest()
        if name not in recorded:
            if found != ours and is_of_another:
                of_release.append(name)
            elif found != ours:
                changes.append(FileChange(name, f"differs from {PACKAGE}'s", False))
        elif found != recorded[name]:
            if found != ours:
                changes.append(FileChange(name, f"is not what the conversion wrote, nor {PACKAGE}'s", as_converted))
            elif as_converted:
                changes.append(FileChange(name, f"is not what the conversion wrote, but {PACKAGE}'s", True))
        elif found != ours:
            if not is_of_another:
                finding = f"is what is recorded of the conversion, but differs from {PACKAGE}'s, which made it"
                changes.append(FileChange(name, finding, False))
            else:
                of_release.append(name)
    if not of_release:
        return changes, []
    package, transformers = writers
    note = (
        f"code is of hf_hyperconn {package} and Transformers {transformers}, and differs from that of {PACKAGE} and "
        f"Transformers {release()}: {', '.join(of_release)} (`hf-hyperconn refresh` brings it up to date)"
    )
    return changes, [note]


def _other_code(names: set[str]) -> list[str]:
    """Notes of files of Python that are not of the model: of each beside it, and of those in folders together."""
    found = sorted(name for name in names if name.endswith(".py") and not NOT_FOR_A_REPO.fullmatch(name))
    inside = tuple(name for name in found if "/" in name)
    notes = [f"{name} is not of the model's code" for name in found if "/" not in name]
    if inside:
        notes.append(f"{named(inside)} {'is' if len(inside) == 1 else 'are'} not of the model's code")
    return notes


def _json(value) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _shown(value) -> str:
    text = _json(value)
    return text if len(text) < SHOWN else f"{text[:SHOWN]}..."
