"""The config.json of a hyper-connection checkpoint: what must be in it before anything is computed from it."""

from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.families import Family, configs_of_stacks, find_family
from hf_hyperconn.models.connection_fields import CONNECTIONS, FORMAT, fault

from .sizes import is_size
from .source import COMMIT, CONFIG, Source


def family_of(source: Source, config: dict) -> Family:
    """The family of a hyper-connection checkpoint.

    Raises `UnsupportedCheckpointError` when it is of no such family, or its config lacks what all of them have.
    """
    model_type, name = config.get("model_type"), source.name
    if isinstance(model_type, str) and not model_type.startswith("hc_") and (plain := _family(model_type)):
        raise UnsupportedCheckpointError(
            f"{name!r} is a plain {plain.name}, without hyper-connections. Convert it: hf-hyperconn convert {name}"
        )
    if not isinstance(model_type, str) or not model_type.startswith("hc_"):
        raise UnsupportedCheckpointError(
            f"{name!r} has model_type {model_type!r:.60}; give a checkpoint with hyper-connections, whose model type "
            f"starts with hc_."
        )
    try:
        family = find_family(model_type.removeprefix("hc_"))
    except UnsupportedCheckpointError as error:
        raise UnsupportedCheckpointError(f"{name!r} has model_type {model_type!r:.60}: {error}") from error
    if not isinstance(config.get("connection"), str) or config["connection"] not in CONNECTIONS:
        raise UnsupportedCheckpointError(
            f"{CONFIG} of {name!r} has connection {config.get('connection')!r:.40}; known are "
            f"{', '.join(CONNECTIONS)}. A newer hf_hyperconn may know it."
        )
    if found := _fault(config, family):
        raise UnsupportedCheckpointError(f"{CONFIG} of {name!r} has {found}. Download it again.")
    return family


def _family(model_type: str) -> Family | None:
    try:
        return find_family(model_type)
    except UnsupportedCheckpointError:
        return None


def _fault(config: dict, family: Family) -> str | None:
    """The first field that is not what it is in any model."""
    sizes = {field: config.get(field) for field in ("hidden_size", "num_hidden_layers", "hc_mult")}
    for of_stack, each in zip(family.stacks, configs_of_stacks(config), strict=True):
        sizes[of_stack.source.count] = each.get("num_hidden_layers")
    for field, value in sizes.items():
        if not is_size(value):
            return f"{field} {value!r:.20}, not a size of a model"
    if not is_size(found := config.get("hc_format", FORMAT)) or found > FORMAT:
        return f"hc_format {found!r:.20}; this release knows formats up to {FORMAT}, a newer hf_hyperconn may know it"
    if found := fault(config):
        return f"fields of no model: {found}"
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        return f"architectures {architectures!r:.20}, not a list of names"
    base, commit = config.get("hc_base_model"), config.get("hc_base_commit")
    if not isinstance(base, str | None):
        return f"hc_base_model {base!r:.20}, not a name"
    if commit is not None and not COMMIT.fullmatch(str(commit)):
        return f"hc_base_commit {commit!r:.20}, not a commit"
    return None
