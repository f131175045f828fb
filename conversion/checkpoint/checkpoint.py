"""A checkpoint, opened once: its source, config, family, weights and record."""

from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.families.family import Family, configs_of_stacks, find_family, usual_names
from hf_hyperconn.models.connection_fields import ACCEPTED, FORMAT, fault_of_fields

from ..files.reading import is_size
from .checkpoint_files import Weights, read_raw_config, read_weights
from .record import read_record
from .source import COMMIT, CONFIG, LocalSource, Source


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint of a base or of a conversion. Weights and record are read at their first use.

    source: where its files are.
    raw_config: its config.json.
    family: the family of its model.
    """

    source: Source
    raw_config: dict
    family: Family

    @property
    def name(self) -> str:
        """Return the folder or Hub id, as the user gave it."""
        return self.source.name

    @cached_property
    def config(self) -> dict:
        """Return the config, with the usual names of its sizes besides its own.

        Where an inner model has the layers, sizes and connections are the inner model's.
        """
        is_conversion = str(self.raw_config.get("model_type")).startswith("hc_")
        of_family = {} if is_conversion else {"model_type": self.family.model_type}
        return usual_names({**self.raw_config, **of_family})

    @property
    def architectures(self) -> list[str]:
        """Return the names of the saved classes, or the name of the usual class."""
        return self.raw_config.get("architectures") or [self.family.usual_architecture]

    @cached_property
    def weights(self) -> Weights:
        """Return the weights, by their headers.

        Raises `UnsupportedCheckpointError` when there are no safetensors weights, or they are incomplete or corrupt.
        """
        return read_weights(self.source)

    @cached_property
    def stack_prefixes(self) -> tuple[str, ...]:
        """Return the beginning of the names of the tensors in each list of layers, as `model.layers.`."""
        return self.weights.stack_prefixes(self.family)

    @cached_property
    def record(self) -> dict | None:
        """Return the record of a conversion; None without one.

        Raises `UnsupportedCheckpointError` when the record is not as the converter writes it.
        """
        return read_record(self.source)


def open_conversion(source: Source | Path | str) -> Checkpoint:
    """Open a checkpoint with hyper-connections, of a folder or a source.

    Raises `UnsupportedCheckpointError` when it has none, or its config is of another model.
    """
    source = source if isinstance(source, Source) else LocalSource(Path(source))
    written = read_raw_config(source)
    return Checkpoint(source, written, _family_of(source, usual_names(written)))


def _family_of(source: Source, config: dict) -> Family:
    """Return the family of a hyper-connection checkpoint.

    Raises `UnsupportedCheckpointError` for another family, or a config that lacks a field of all families.
    """
    model_type, name = config.get("model_type"), source.name
    if not isinstance(model_type, str) or not model_type.startswith("hc_"):
        refusal = (
            f"{name!r} has model_type {model_type!r:.60}; give a checkpoint with hyper-connections, whose model type "
            f"starts with hc_."
        )
        with suppress(UnsupportedCheckpointError):
            refusal = (
                f"{name!r} is a plain {find_family(str(model_type)).name}, without hyper-connections. Convert it: "
                f"hf-hyperconn convert {name}"
            )
        raise UnsupportedCheckpointError(refusal)
    try:
        family = find_family(model_type.removeprefix("hc_"))
    except UnsupportedCheckpointError as error:
        raise UnsupportedCheckpointError(f"{name!r} has model_type {model_type!r:.60}: {error}") from error
    if not isinstance(config.get("connection"), str) or config["connection"] not in ACCEPTED:
        raise UnsupportedCheckpointError(
            f"{CONFIG} of {name!r} has connection {config.get('connection')!r:.40}; known are "
            f"{', '.join(ACCEPTED)}. A newer hf_hyperconn may know it."
        )
    if is_size(version := config.get("hc_format", 1)) and version > FORMAT:
        raise UnsupportedCheckpointError(
            f"{CONFIG} of {name!r} has hc_format {version}; this release knows formats up to {FORMAT}. Install a "
            f"newer hf_hyperconn."
        )
    if fault := _fault(config, family):
        raise UnsupportedCheckpointError(f"{CONFIG} of {name!r} has {fault}. Download it again.")
    return family


def _fault(config: dict, family: Family) -> str | None:
    """Find the first field with an impossible value."""
    sizes = {field: config.get(field) for field in ("hidden_size", "num_hidden_layers", "hc_mult")}
    for family_of_stack, config_of_stack in zip(family.stacks, configs_of_stacks(config), strict=True):
        sizes[family_of_stack.source.count] = config_of_stack.get("num_hidden_layers")
    for field, value in sizes.items():
        if not is_size(value):
            return f"{field} {value!r:.20}, not a size of a model"
    if not is_size(version := config.get("hc_format", 1)):
        return f"hc_format {version!r:.20}, not a number of a format"
    if fault := fault_of_fields(config):
        return f"fields of no model: {fault}"
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        return f"architectures {architectures!r:.20}, not a list of names"
    base, commit = config.get("hc_base_model"), config.get("hc_base_commit")
    if not isinstance(base, str | None):
        return f"hc_base_model {base!r:.20}, not a name"
    if commit is not None and not COMMIT.fullmatch(str(commit)):
        return f"hc_base_commit {commit!r:.20}, not a commit"
    return None
