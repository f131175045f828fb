"""Changed files of a conversion, and fields of its config that differ from the base's."""

import hashlib
import json
import re
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import dataclass

from hf_hyperconn import __version__
from hf_hyperconn.families.family import Family, usual_names
from hf_hyperconn.families.reading.source_files import release
from hf_hyperconn.kinds import FIELDS, field_value
from hf_hyperconn.models.connection_fields import one_of

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.checkpoint_files import INDEX
from ..checkpoint.connection_options import exact_values
from ..checkpoint.model_code import code_files, code_of_this_release, releases_of_code
from ..checkpoint.repository_files import NOT_FOR_A_REPO
from ..checkpoint.source import CONFIG, GENERATE
from ..terminal import name_some

PACKAGE = f"hf_hyperconn {__version__}"

# fields of a config that a conversion sets itself
CONVERSION_FIELDS = (
    *(*FIELDS, "model_type", "architectures", "auto_map", "_name_or_path"),
    *("hc_base_model", "hc_base_commit", "hc_format", "hc_version"),
)
UNRELATED_FIELDS = ("transformers_version", "dtype", "use_cache")  # fields that are not the model's
# of no part of a model, and checkpoints of a training run: Transformers imports none of their code
UNREAD = re.compile(rf"{NOT_FOR_A_REPO.pattern}|checkpoint-\d+/.*", re.DOTALL)
LONGEST_SHOWN = 60  # characters of a value, in a message


@dataclass(frozen=True)
class FileChange:
    """A file that is not as it was written.

    name: path in the checkpoint.
    finding: the difference, shown after the name.
    fails: whether a conversion with this file fails verification.
    """

    name: str
    finding: str
    fails: bool

    def __str__(self) -> str:
        return f"{self.name} {self.finding}"


def find_changes(
    checkpoint: Checkpoint, *, as_converted: bool, digest_of: Callable[[str], str]
) -> tuple[tuple[FileChange, ...], tuple[str, ...]]:
    """Compare code, config, index and companions with the record, and code with this package's.

    as_converted: whether nobody has trained the checkpoint since its conversion. After training, config, index and
        tokenizer are Transformers' own, and code alone can be judged.
    digest_of: returns the SHA-256 of a file of the checkpoint.

    Returns the files that changed, and notes on other files.
    """
    source, recorded = checkpoint.source, (checkpoint.record or {}).get("files") or {}
    code = code_files(checkpoint)
    changes, notes = _code_changes(checkpoint, code, as_converted, digest_of)
    for name, expected in recorded.items():
        if name in code or (name in (CONFIG, INDEX) and not as_converted):
            continue
        if name not in source.files:
            notes.append(f"{name}, which the conversion copied, is missing")
        elif digest_of(name) != expected:
            change = FileChange(name, "is not as the conversion wrote it", name in (CONFIG, INDEX))
            changes.append(change) if as_converted else notes.append(str(change))
    if GENERATE in source.files:
        change = FileChange(GENERATE, "is code that `generate` would run", True)
        changes.append(change) if as_converted else notes.append(str(change))
    others = {*source.files} - {*code, *recorded, GENERATE}
    python = sorted(name for name in others if name.endswith(".py") and not UNREAD.fullmatch(name))
    notes += [f"{name} is not of the model's code" for name in python if "/" not in name]
    if inside := tuple(name for name in python if "/" in name):
        notes.append(f"{name_some(inside)} {'is' if len(inside) == 1 else 'are'} not of the model's code")
    return tuple(changes), tuple(notes)


def _code_changes(
    checkpoint: Checkpoint, code: Iterable[str], as_converted: bool, digest_of: Callable[[str], str]
) -> tuple[list[FileChange], list[str]]:
    """Compare files of model code with the record, and with this package's; arguments as for `find_changes`."""
    recorded = (checkpoint.record or {}).get("files") or {}
    package, transformers = releases_of_code(checkpoint)
    is_of_another = None not in (package, transformers) and (package, transformers) != (__version__, release())
    changes, of_another = [], []
    for name in code:
        if name not in checkpoint.source.files:
            continue
        text = code_of_this_release(name, checkpoint.config)
        ours = None if text is None else hashlib.sha256(text.encode()).hexdigest()
        digest, expected = digest_of(name), recorded.get(name)
        if digest == ours:
            if as_converted and expected not in (None, digest):
                changes.append(FileChange(name, f"is not as the conversion wrote it, but {PACKAGE}'s", True))
        elif expected not in (None, digest):
            changes.append(FileChange(name, f"is not as the conversion wrote it, nor {PACKAGE}'s", as_converted))
        elif is_of_another:
            of_another.append(name)
        elif expected is None:
            changes.append(FileChange(name, f"differs from {PACKAGE}'s", False))
        else:
            finding = f"is as recorded of the conversion, but differs from {PACKAGE}'s, which made it"
            changes.append(FileChange(name, finding, False))
    note = (
        f"code is of hf_hyperconn {package} and Transformers {transformers}, and differs from the code of {PACKAGE} "
        f"and Transformers {release()}: {', '.join(of_another)} (`hf-hyperconn refresh` brings it up to date)"
    )
    return changes, [note] if of_another else []


def config_differences(checkpoint: Checkpoint, base: dict) -> list[str]:
    """Find fields of the model in the config of a checkpoint that differ from its base's config.json.

    Where any differs, both configs are read as Transformers reads them: newer releases and saving add and rename
    fields, and leave out defaults.
    """
    config, family = checkpoint.config, checkpoint.family
    if differences := _differences(config, base, family):
        from transformers import CONFIG_MAPPING

        hc_class = getattr(family.configuration_module(), f"HC{family.name}Config")
        try:
            ours = hc_class.from_dict(deepcopy(config)).to_dict()
            theirs = CONFIG_MAPPING[family.base_model_type].from_dict(deepcopy(base)).to_dict()
            lasting = {field: value for field, value in theirs.items() if field not in UNRELATED_FIELDS}
            differences = _differences(ours, lasting, family)
        except Exception:  # whatever a class makes of values that Transformers can't have written
            pass
    readouts, readout = exact_values("hc_readout"), field_value(config, "hc_readout")
    if readout not in readouts:
        differences.append(f"hc_readout is {readout!r}, of a conversion {one_of(readouts)}")
    return differences


def _differences(config: dict, base: dict, family: Family) -> list[str]:
    """Find fields of a base that differ in a config, without fields that a conversion sets.

    Where an inner model has the layers, the inner model's fields are compared.
    """
    config, base = usual_names(config), usual_names({**base, "model_type": family.model_type})
    if isinstance(base.get(family.part_field), dict):
        base.pop(family.part_field)
    differences = []
    for field, value in base.items():
        if field not in CONVERSION_FIELDS and field not in config:
            differences.append(f"{field} is missing, in the base {_shown(value)}")
        elif field not in CONVERSION_FIELDS and _json(config[field]) != _json(value):
            differences.append(f"{field} is {_shown(config[field])}, in the base {_shown(value)}")
    return differences


def _json(value) -> str:
    return json.dumps(value, sort_keys=True, default=str)


def _shown(value) -> str:
    text = _json(value)
    return text if len(text) < LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
