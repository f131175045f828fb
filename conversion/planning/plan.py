"""What a conversion will do, decided and checked before anything is written."""

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
from hf_hyperconn.kinds import FORMAT, KINDS, sub_layers
from hf_hyperconn.models.connection_fields import GivenFields, fault

from ..checkpoint.checkpoint import Checkpoint
from ..checkpoint.checkpoint_files import Weights, read_written_config, refuse_other_weights
from ..checkpoint.fields import described, fields_of_conversion
from ..checkpoint.sizes import fault_of_sizes, more_than_layers
from ..checkpoint.source import CONFIG, Source, open_source
from ..files.reading import is_size
from .companions import check_links, check_no_code, check_split_of_text, companions_of, left_behind
from .output_folder import OutputFolder, plan_output_folder
from .refusals import quantization, refuse_own_code, refuse_unfit

LINKS = ("copy", "hard", "symlink")

# model types whose layers are no chain of branches, each added to a residual stream of weight one
SCALED_RESIDUAL = ("minimax",)
NORMED_RESIDUAL = ("bert", "distilbert", "roberta")
OTHERWISE = {
    **dict.fromkeys(SCALED_RESIDUAL, "scales the residual stream itself"),
    **dict.fromkeys(NORMED_RESIDUAL, "norms the residual stream itself"),
}

ACCEPTED = "docs/families.md lists what can be converted."


@dataclass(frozen=True)
class ConversionPlan:
    """A checked conversion.

    shards: name in the output by name in the base, in order; the hyper-connection shard comes after them.
    output: where OUT is, and whether it is renamed.
    companions: files copied unchanged besides the weights.
    left: files of the base that stay behind, hidden ones aside.
    bytes_needed: what the output takes on disk beyond what it shares with the base.
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
        """Size of the base's weight files."""
        return sum(self.base.source.files[name] for name in self.shards)

    @property
    def hc_parameters(self) -> int:
        """Number of parameters the hyper-connections add."""
        return connection_parameters({**self.base.config, **self.fields}, self.base.family.norm)

    @property
    def loading(self) -> str:
        """The call that loads the output from its folder: of an Auto class, which for a backbone would ask the Hub."""
        (architecture, *_) = _architectures(self.base.config, self.base.family)
        name = auto_class(self.base.family.head_of(architecture))
        if name == "AutoBackbone":
            return f'hf_hyperconn.HC{architecture}.from_pretrained("{self.out}")'
        return f'{name}.from_pretrained("{self.out}", trust_remote_code=True)'

    @property
    def config(self) -> dict:
        """The config.json of the output: the base's, with its new type, classes and connection fields.

        Where older releases of Transformers loaded the base from, which can be a path, is left out.
        """
        config = {name: value for name, value in self.base.written.items() if name != "_name_or_path"}
        config |= {
            "model_type": self.base.family.hc_model_type,
            "architectures": [
                self.base.family.architectures[name] for name in _architectures(self.base.config, self.base.family)
            ],
            "auto_map": self.base.family.auto_map,
            "hc_format": FORMAT,
            "hc_version": __version__,
        }
        field = self.base.family.part_field
        if self.base.family.part is not None and isinstance(config.get(field), dict):
            part = {name: value for name, value in config[field].items() if name != "_name_or_path"}
            types = {"model_type": self.base.family.part.hc_model_type}
            config[field] = {**part, **types, **self.fields}
        else:
            config |= self.fields
        if self.base.source.commit:
            config |= {"hc_base_model": self.base.source.name, "hc_base_commit": self.base.source.commit}
        return config

    @cached_property
    def code(self) -> dict[str, str]:
        """The files of code that the output brings, by their names: their text."""
        return self.base.family.code(self.config)

    def fingerprint(self) -> list:
        """What an interrupted conversion must have in common with this one to be resumed."""
        files = {name: self.base.source.files[name] for name in (*self.shards, *self.companions)}
        return json.loads(json.dumps([self.base.source.name, self.base.source.commit, files, self.config, self.link]))

    def as_dict(self) -> dict:
        """The plan for machines."""
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
            "link": self.link,
            "bytes_needed": self.bytes_needed,
            "bytes_free": self.bytes_free,
        }

    def describe(self) -> str:
        """The plan for people."""
        config, commit = self.base.config, f"@{self.base.source.commit[:7]}" if self.base.source.commit else ""
        stacks = configs_of_stacks(config)
        modules, layers = sum(map(sub_layers, stacks)), sum(each["num_hidden_layers"] for each in stacks)
        how = {"copy": "copied unchanged", "hard": "hard-linked", "symlink": "linked symbolically"}[self.link]
        share = 100 * self.hc_parameters / self.base.weights.parameters
        rows = [
            ("base weights", f"{len(self.shards)} file(s), {gigabytes(self.base_bytes)}, {how}"),
            (
                "hc weights",
                f"{modules} modules, {described(self.fields)}, float32: +{self.hc_parameters:,} parameters "
                f"(+{share:.3g} %)",
            ),
            ("code", " ".join(self.code)),
            ("also copied", " ".join(self.companions) or "nothing"),
            *([("left behind", " ".join(self.left))] if self.left else []),
            *([("renames", f"the old one to {self.output.path.name}.replaced-<time>")] * self.output.is_replaced),
            ("output", f"{self.out}: needs {gigabytes(self.bytes_needed)}, {gigabytes(self.bytes_free)} free"),
        ]
        head = (
            f"Plan: {self.base.source.name}{commit} ({self.base.family.model_type}, {layers} layers, "
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
    """Decide how MODEL becomes OUT, and refuse what can't be converted; nothing is written.

    model: local folder or Hub id.
    out: folder to make; by default the model's name followed by `-HCx<n>` (`-AttnRes` for attention residuals), here.
    fields: of the hyper-connections to add; None for the usual ones.
    stack: which model in it gets them, by its attribute, as in `convert_model`; None for the usual ones.
    revision: of a Hub repo.
    link: "copy", "hard" or "symlink": how base shards reach OUT.
    force: whether an OUT that exists is renamed.

    Raises `UnsupportedCheckpointError` for a model that can't be converted, `ConversionError` for an OUT that can't be
    written.
    """
    if link not in LINKS:
        raise ConversionError(f"link {link!r} was asked for; accepted are {', '.join(map(repr, LINKS))}.")
    chosen = fields_of_conversion(**(fields or {}))
    source = open_source(model, revision)
    companions = companions_of(source)
    check_links(source, companions)
    written = read_written_config(source)
    base = Checkpoint(source, written, _family(source, written, stack))
    _check_fields(base)
    if found := fault({**base.config, **chosen}):
        raise ConversionError(f"for {source.name!r}, {found}.")
    weights = base.weights
    _refuse_quantized(source, written, weights)
    if not weights.has_layers:
        raise UnsupportedCheckpointError(
            f"the weights of {source.name!r} hold no decoder layer 0. Give a complete checkpoint."
        )
    refuse_other_weights(source, base.config)
    if found := fault_of_sizes(base):
        raise UnsupportedCheckpointError(
            f"{CONFIG} of {source.name!r} does not fit its weights: {found}. Copy or download it again."
        )
    if more := more_than_layers(base):
        refuse_unfit(base, because=f"{more}; ")
    count = len(weights.files) + 1
    shards = {name: f"model-{i:05}-of-{count:05}.safetensors" for i, name in enumerate(weights.files, start=1)}
    if outside := [name for name in companions if name.startswith("/") or ".." in name.split("/")]:
        raise UnsupportedCheckpointError(f"{source.name!r} lists {outside[0]!r}, a path outside it. Do not trust it.")
    check_no_code(source, companions)
    check_split_of_text(source, written)
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


def gigabytes(count: float) -> str:
    """A number of bytes for people."""
    for unit in ("bytes", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


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
    if model_type in OTHERWISE:
        raise UnsupportedCheckpointError(
            f"{name!r} can't be converted: {model_type} {OTHERWISE[model_type]}; hyper-connections stand for "
            f"additions, one after the other, to a residual stream. {ACCEPTED}"
        )
    _refuse_quantized(source, config)
    refuse_own_code(source, config)
    refuse_other_stacks(repr(name), model_type, stack)
    try:
        family = find_family(name_of_family(config, stack))
    except UnsupportedCheckpointError as error:
        raise UnsupportedCheckpointError(f"{name!r} can't be converted: {error} {ACCEPTED}") from error
    architectures = config.get("architectures")
    if architectures is not None and not (
        isinstance(architectures, list) and all(isinstance(architecture, str) for architecture in architectures)
    ):
        raise UnsupportedCheckpointError(
            f"{CONFIG} of {name!r} has architectures {architectures!r:.40}, not a list of names. Download it again."
        )
    for architecture in _architectures(config, family):
        if architecture not in family.architectures:
            raise UnsupportedCheckpointError(
                f"{name!r} is a {architecture}; hf-hyperconn converts: {', '.join(family.architectures)}."
            )
    return family


def _refuse_quantized(source: Source, config: dict, weights: Weights | None = None) -> None:
    if found := quantization(source, config, weights):
        raise UnsupportedCheckpointError(
            f"{source.name!r} is quantised ({found}); convert the full-precision checkpoint instead."
        )


def _check_fields(base: Checkpoint) -> None:
    """Refuse sizes that are none, and settings with which layers have other branches than those that were cut."""
    name, config, family = base.name, base.config, base.family
    if (backbone := config.get("backbone_config")) is not None:
        kind = backbone.get("model_type") if isinstance(backbone, dict) else backbone
        raise UnsupportedCheckpointError(
            f"{name!r} has its layers in a backbone (backbone_config, {kind!r:.40}), where "
            f"{family.model_type} has none. {ACCEPTED}"
        )
    for field in ("num_hidden_layers", "hidden_size"):
        if (value := config.get(field)) is None:
            raise UnsupportedCheckpointError(
                f"{CONFIG} of {name!r} has no {field}. Download it again; where a family's config never has it, "
                f"convert in memory (convert_model)."
            )
        if isinstance(value, list):
            raise UnsupportedCheckpointError(
                f"{name!r} can't be converted: its layers come in stages ({field} {value!r:.20}), not in one list. "
                f"{ACCEPTED}"
            )
        if not is_size(value):
            raise UnsupportedCheckpointError(
                f"{CONFIG} of {name!r} has {field} {value!r:.20}, not a size of a model. Download it again."
            )
    for of_stack, each in zip(family.stacks, configs_of_stacks(config), strict=True):
        if not is_size(value := each["num_hidden_layers"]):
            raise UnsupportedCheckpointError(
                f"{CONFIG} of {name!r} has {of_stack.source.count} {value!r:.20}, not a size of a model. Download it "
                f"again."
            )
    for field, value in family.source.settings.items():
        if (found := config.get(field, value)) != value:
            raise UnsupportedCheckpointError(
                f"{CONFIG} of {name!r} has {field} {found!r:.20}; hf-hyperconn knows the layers of "
                f"{family.model_type} with {field} {value!r}. {ACCEPTED}"
            )


def _architectures(config: dict, family: Family) -> list[str]:
    return config.get("architectures") or [family.usual_architecture]


def _with_space_checked(plan: ConversionPlan) -> ConversionPlan:
    parent = plan.output.path.parent
    kept = sum(plan.base.source.files[name] for name in plan.companions)
    needed = kept + 4 * plan.hc_parameters + 2**20
    if plan.link == "copy":
        done = {target for target in plan.shards.values() if (plan.output.work / target).is_file()}
        needed += sum(plan.base.source.files[name] for name, target in plan.shards.items() if target not in done)
    cache, download = plan.base.source.to_download([*plan.shards, *plan.companions])
    if download and os.stat(cache).st_dev == os.stat(parent).st_dev:
        needed += download
    elif download > (cache_free := shutil.disk_usage(cache).free):
        raise ConversionError(
            f"downloading {plan.base.source.name!r} needs {gigabytes(download)} in '{cache}', "
            f"{gigabytes(cache_free)} free. Free some space, or set HF_HOME elsewhere."
        )
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise ConversionError(
            f"needs {gigabytes(needed)} in '{parent}', {gigabytes(free)} free. Free some space, or use --link hard."
        )
    return replace(plan, bytes_needed=needed, bytes_free=free)
