"""The plan of a conversion, decided and checked before anything is written."""

import json
import os
import shutil
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from hf_hyperconn import __version__
from hf_hyperconn.analysis.costs import connection_parameters
from hf_hyperconn.errors import ConversionError, UnsupportedCheckpointError
from hf_hyperconn.families.family import Family, configs_of_stacks, find_family, name_of_family, refuse_other_stacks
from hf_hyperconn.families.reading.classes import auto_class
from hf_hyperconn.kinds import FORMAT, KINDS, count_sub_layers
from hf_hyperconn.models.connection_fields import GivenFields, fault_of_fields, one_of

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.checkpoint_files import INDEX, read_raw_config, refuse_links_out, refuse_other_weights
from ..checkpoint.connection_options import describe, fields_of_conversion
from ..checkpoint.readme import README
from ..checkpoint.repository_files import is_of_tokenizer
from ..checkpoint.sizes import fault_of_sizes, more_than_layers
from ..checkpoint.source import CONFIG, Source, open_source
from ..files.reading import is_size
from ..terminal import written_bytes
from .base_refusals import refuse_own_code, refuse_quantized, refuse_unfit
from .companions import check_no_code, check_split_of_text, companions_of, left_behind
from .output_folder import OutputFolder, plan_output_folder

LINKS = ("copy", "hard", "symlink")
MEASURED = 8  # streams, the most in the papers

# model types whose layers are no chain of branches, each added to a residual stream of weight one
OTHER_RESIDUALS = {"minimax": "scales", **dict.fromkeys(("bert", "distilbert", "roberta"), "norms")}

SEE_FAMILIES = "docs/families.md lists the model types."


@dataclass(frozen=True)
class ConversionPlan:
    """A checked conversion.

    shards: name in the output by name in the base, in order; the hyper-connection shard comes after them.
    output: the place of OUT.
    companions: files copied unchanged besides the weights.
    left: files of the base that stay behind, hidden ones aside.
    bytes_needed: bytes on disk for the output, without files that it shares with the base.
    """

    base: Checkpoint
    out: Path
    output: OutputFolder
    fields: dict[str, Any]
    shards: dict[str, str]
    hc_shard: str
    companions: tuple[str, ...]
    left: tuple[str, ...]
    link: str
    bytes_needed: int
    bytes_free: int

    @property
    def base_bytes(self) -> int:
        """Return the size of the base's weight files."""
        return sum(self.base.source.files[name] for name in self.shards)

    @property
    def warnings(self) -> tuple[str, ...]:
        """Return facts that a user may not have intended."""
        n, warnings = self.fields["hc_mult"], []
        if n > MEASURED and self.fields["connection"] != "frac":
            warnings.append(
                f"hc_mult is {n}, and the papers measure up to {MEASURED} streams. Activations of the residual "
                f"stream need {n} times the memory."
            )
        if "vocab_size" in self.base.config and not any(map(is_of_tokenizer, self.companions)):
            warnings.append(
                f"{self.base.name!r} has no tokenizer. Copy one into '{self.out}', or load it from elsewhere."
            )
        return tuple(warnings)

    @property
    def hc_parameters(self) -> int:
        """Count the parameters of the hyper-connections."""
        return connection_parameters({**self.base.config, **self.fields}, self.base.family.norm)

    @property
    def loading(self) -> str:
        """Return the call that loads the output from its folder.

        It is of an Auto class. For a backbone, which an Auto class would look for on the Hub, it is of its class.
        """
        architecture = self.base.architectures[0]
        name = auto_class(self.base.family.head_of(architecture))
        if name == "AutoBackbone":
            return f'hf_hyperconn.HC{architecture}.from_pretrained("{self.out}")'
        return f'{name}.from_pretrained("{self.out}", trust_remote_code=True)'

    @property
    def config(self) -> dict:
        """Return the config.json of the output: the base's, with the new type, classes and fields.

        `_name_or_path` is left out: older releases of Transformers wrote a path of their machine there.
        """
        family = self.base.family
        config = {name: value for name, value in self.base.raw_config.items() if name != "_name_or_path"}
        config |= {
            "model_type": family.hc_model_type,
            "architectures": [family.architectures[name] for name in self.base.architectures],
            "auto_map": family.auto_map,
            "hc_format": FORMAT,
            "hc_version": __version__,
        }
        field = family.part_field
        if family.part is not None and isinstance(config.get(field), dict):
            part = {name: value for name, value in config[field].items() if name != "_name_or_path"}
            config[field] = {**part, "model_type": family.part.hc_model_type, **self.fields}
        else:
            config |= self.fields
        if self.base.source.commit:
            config |= {"hc_base_model": self.base.source.name, "hc_base_commit": self.base.source.commit}
        return config

    @cached_property
    def code(self) -> dict[str, str]:
        """Return the texts of the output's files of code, by name."""
        return self.base.family.code(self.config)

    def fingerprint(self) -> list:
        """Return the facts that an interrupted conversion must share with this plan to be continued."""
        source = self.base.source
        files = {name: source.files[name] for name in (*self.shards, *self.companions)}
        return json.loads(json.dumps([source.name, source.commit, files, self.config, self.link]))

    def as_dict(self) -> dict:
        """Return the plan for machines."""
        return {
            "model": self.base.source.name,
            "commit": self.base.source.commit,
            "out": str(self.out),
            "replaces": self.output.is_replaced,
            "family": self.base.family.model_type,
            **self.fields,
            "base_parameters": self.base.weights.parameters,
            "base_bytes": self.base_bytes,
            "hc_parameters": self.hc_parameters,
            "shards": {**self.shards, "(hyper-connections)": self.hc_shard},
            "code": list(self.code),
            "companions": list(self.companions),
            "left": list(self.left),
            "warnings": list(self.warnings),
            "link": self.link,
            "bytes_needed": self.bytes_needed,
            "bytes_free": self.bytes_free,
        }

    def describe(self) -> str:
        """Describe the plan for people."""
        config, source = self.base.config, self.base.source
        commit, stacks = f"@{source.commit[:7]}" if source.commit else "", configs_of_stacks(config)
        modules, layers = sum(map(count_sub_layers, stacks)), sum(stack["num_hidden_layers"] for stack in stacks)
        how = {"copy": "copied unchanged", "hard": "hard-linked", "symlink": "linked symbolically"}[self.link]
        share = 100 * self.hc_parameters / self.base.weights.parameters
        rows = [
            ("base weights", f"{len(self.shards)} file(s), {written_bytes(self.base_bytes)}, {how}"),
            (
                "hc weights",
                f"{modules} modules, {describe(self.fields)}, float32: +{self.hc_parameters:,} parameters "
                f"(+{share:.3g} %)",
            ),
            ("code", " ".join(self.code)),
            ("also copied", " ".join(self.companions) or "nothing"),
            *([("left behind", " ".join(self.left))] if self.left else []),
            *([("renames", f"the old one to {self.output.path.name}.replaced-<time>")] * self.output.is_replaced),
            ("output", f"{self.out}: needs {written_bytes(self.bytes_needed)}, {written_bytes(self.bytes_free)} free"),
            *(("warning", warning) for warning in self.warnings),
        ]
        head = (
            f"Plan: {source.name}{commit} ({self.base.family.model_type}, {layers} layers, "
            f"hidden {config['hidden_size']}, {self.base.weights.dtype})"
        )
        return "\n".join([head, *(f"  {name:<14} {text}" for name, text in rows)])


def plan_conversion(
    model: str,
    out: str | os.PathLike | None = None,
    *,
    fields: GivenFields | None = None,
    stack: str | None = None,
    revision: str | None = None,
    link: str = "copy",
    force: bool = False,
) -> ConversionPlan:
    """Decide how MODEL becomes OUT, and refuse a model that can't be converted; nothing is written.

    model: local folder or Hub id.
    out: folder to make, by default `<model's name>-HCx<n>` here, `-AttnRes` for attention residuals.
    fields: fields of the connections to add; None for the defaults.
    stack: the inner model that gets connections, by its attribute, as in `convert_model`; None for the usual ones.
    revision: branch, tag or commit of a Hub repo.
    link: "copy", "hard" or "symlink": how base shards reach OUT.
    force: whether an existing OUT is renamed.

    Raises `UnsupportedCheckpointError` for a model that can't be converted, and `ConversionError` for another OUT.
    """
    if link not in LINKS:
        raise ConversionError(f"link must be {one_of(LINKS)} (got {link!r}). Give one of these.")
    chosen = fields_of_conversion(**(fields or {}))
    source = open_source(model, revision)
    companions = companions_of(source)
    refuse_links_out(source, (CONFIG, INDEX, README, *companions))
    base = open_base(source, stack, chosen)
    if outside := [name for name in companions if name.startswith("/") or ".." in name.split("/")]:
        raise UnsupportedCheckpointError(f"{source.name!r} lists {outside[0]!r}, a path outside it. Do not trust it.")
    check_no_code(source, companions)
    check_split_of_text(source, base.raw_config)
    files = base.weights.files
    count = len(files) + 1
    shards = {name: f"model-{i:05}-of-{count:05}.safetensors" for i, name in enumerate(files, start=1)}
    if out is None:
        out = f"{Path(os.path.abspath(model)).name}-{KINDS[chosen['connection']].suffix(chosen['hc_mult'])}"
    out = Path(out)
    plan = ConversionPlan(
        base=base,
        out=out,
        output=plan_output_folder(out, source, (CONFIG, *shards, *companions), force=force),
        fields=chosen,
        shards=shards,
        hc_shard=f"model-{count:05}-of-{count:05}.safetensors",
        companions=companions,
        left=left_behind(source, (*shards, *companions)),
        link=link,
        bytes_needed=0,
        bytes_free=0,
    )
    try:
        return _with_space_checked(plan)
    except OSError as error:
        where = "" if error.filename is None else f"'{error.filename}': "
        raise ConversionError(
            f"can't see how much space is needed for '{out}': {where}{error.strerror}. Allow that, remove it, or "
            f"choose another OUT."
        ) from error


def open_base(source: Source, stack: str | None, fields: dict[str, Any]) -> Checkpoint:
    """Open a base, and check that it can get connections with these fields.

    Raises `UnsupportedCheckpointError` for a config or weights of no base, and `ConversionError` for its fields.
    """
    base = _open_base(source, stack)
    if reason := fault_of_fields({**base.config, **fields}):
        raise ConversionError(f"for {source.name!r}, {reason}.")
    _check_weights(base)
    return base


def _open_base(source: Source, stack: str | None) -> Checkpoint:
    """Open a base, and refuse a config of a model that can't be converted."""
    config = read_raw_config(source)
    base = Checkpoint(source, config, _family(source, config, stack))
    architectures = config.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(architecture, str) for architecture in architectures)
    ):
        raise UnsupportedCheckpointError(
            f"{CONFIG} of {base.name!r} has architectures {architectures!r:.40}, not a list of names. "
            f"Download it again."
        )
    for architecture in base.architectures:
        if architecture not in base.family.architectures:
            raise UnsupportedCheckpointError(
                f"{base.name!r} is a {architecture}; hf-hyperconn converts: {', '.join(base.family.architectures)}."
            )
    _check_sizes(base)
    for field, value in base.family.source.settings.items():
        if (setting := base.config.get(field, value)) != value:
            raise UnsupportedCheckpointError(
                f"{CONFIG} of {base.name!r} has {field} {setting!r:.20}; hf-hyperconn knows the layers of "
                f"{base.family.model_type} with {field} {value!r}. {SEE_FAMILIES}"
            )
    return base


def _family(source: Source, config: dict, stack: str | None) -> Family:
    model_type, name = config.get("model_type"), source.name
    if "hc_mult" in config or str(model_type).startswith("hc_"):
        raise UnsupportedCheckpointError(
            f"{name!r} is already a hyper-connection model (n={config.get('hc_mult')}). Convert its base instead."
        )
    if not isinstance(model_type, str):
        raise UnsupportedCheckpointError(
            f"{name!r} has model_type {model_type!r:.40}, which is not a name. Download it again."
        )
    if model_type in OTHER_RESIDUALS:
        raise UnsupportedCheckpointError(
            f"{name!r} can't be converted: {model_type} {OTHER_RESIDUALS[model_type]} the residual stream itself; "
            f"hyper-connections stand for additions, one after the other, to a residual stream. {SEE_FAMILIES}"
        )
    refuse_quantized(source, config)
    refuse_own_code(source, config)
    refuse_other_stacks(repr(name), model_type, stack)
    try:
        return find_family(name_of_family(config, stack))
    except UnsupportedCheckpointError as error:
        raise UnsupportedCheckpointError(f"{name!r} can't be converted: {error} {SEE_FAMILIES}") from error


def _check_sizes(base: Checkpoint) -> None:
    """Refuse a config without a hidden size, or without a number of layers in one list."""
    name, config, family = base.name, base.config, base.family
    if (backbone := config.get("backbone_config")) is not None:
        kind = backbone.get("model_type") if isinstance(backbone, dict) else backbone
        raise UnsupportedCheckpointError(
            f"{name!r} has its layers in a backbone (backbone_config, {kind!r:.40}), where "
            f"{family.model_type} has none. {SEE_FAMILIES}"
        )
    for field in ("num_hidden_layers", "hidden_size"):
        _check_size(name, field, config.get(field))
    for stack, config_of_stack in zip(family.stacks, configs_of_stacks(config), strict=True):
        _check_size(name, stack.source.count, config_of_stack["num_hidden_layers"])


def _check_size(name: str, field: str, value: object) -> None:
    if value is None:
        raise UnsupportedCheckpointError(
            f"{CONFIG} of {name!r} has no {field}. Download it again; where a family's config never has it, "
            f"convert in memory (convert_model)."
        )
    if isinstance(value, list):
        raise UnsupportedCheckpointError(
            f"{name!r} can't be converted: its layers come in stages ({field} {value!r:.20}), not in one list. "
            f"{SEE_FAMILIES}"
        )
    if not is_size(value):
        raise UnsupportedCheckpointError(
            f"{CONFIG} of {name!r} has {field} {value!r:.20}, not a size of a model. Download it again."
        )


def _check_weights(base: Checkpoint) -> None:
    """Refuse packed weights, weights of other sizes than the config's, and weights of other files."""
    refuse_quantized(base.source, base.raw_config, base.weights)
    if not base.weights.has_layers:
        raise UnsupportedCheckpointError(
            f"the weights of {base.name!r} hold no decoder layer 0. Give a complete checkpoint."
        )
    refuse_other_weights(base.source, base.config)
    if reason := fault_of_sizes(base):
        raise UnsupportedCheckpointError(
            f"{CONFIG} of {base.name!r} does not fit its weights: {reason}. Copy or download it again."
        )
    if more := more_than_layers(base):
        refuse_unfit(base, because=f"{more}; ")


def _with_space_checked(plan: ConversionPlan) -> ConversionPlan:
    """Return the plan with its bytes, and refuse a plan that requires more space than is free."""
    source, parent = plan.base.source, plan.output.path.parent
    needed = sum(source.files[name] for name in plan.companions) + 4 * plan.hc_parameters + 2**20
    if plan.link == "copy":
        done = {target for target in plan.shards.values() if (plan.output.work / target).is_file()}
        needed += sum(source.files[name] for name, target in plan.shards.items() if target not in done)
    cache, download = source.to_download([*plan.shards, *plan.companions])
    if download and os.stat(cache).st_dev == os.stat(parent).st_dev:
        needed += download
    elif download > (cache_free := shutil.disk_usage(cache).free):
        raise ConversionError(
            f"downloading {source.name!r} needs {written_bytes(download)} in '{cache}', "
            f"{written_bytes(cache_free)} free. Free some space, or set HF_HOME elsewhere."
        )
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise ConversionError(
            f"needs {written_bytes(needed)} in '{parent}', {written_bytes(free)} free. Free some space, or use "
            f"--link hard."
        )
    return replace(plan, bytes_needed=needed, bytes_free=free)
