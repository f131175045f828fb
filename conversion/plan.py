"""What a conversion will do, decided and checked before anything is written."""

import json
import os
import shutil
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path

from hf_hyperconn.analysis.costs import connection_parameters
from hf_hyperconn.errors import ConversionError, UnsupportedCheckpointError
from hf_hyperconn.families import FAMILIES, Family

from .checkpoint import Weights, read_config, read_weights
from .source import CONFIG, Source, open_source

RECORD = "hyperconn_conversion.json"
LINKS = ("copy", "hard", "symlink")
CONNECTIONS = ("shc", "dhc", "mhc", "ihc", "frac")

# what does not come along: weights in any format, what the conversion writes itself, records of training
LEFT_BEHIND = (
    *("*.safetensors", "*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.ggml", "*.onnx", "*.onnx_data", "*.h5"),
    *("*.msgpack", "*.ot", "*.tflite", "*.npz", "*.mlmodel", "*.index.json", "*.py", "*.lock", CONFIG, RECORD),
    *("README.md", ".*", "original/*", "onnx/*", "coreml/*", "openvino/*", "metal/*", "runs/*", "checkpoint-*/*"),
    *("trainer_state.json", "*.distcp", "wandb/*", "__pycache__/*", "*.part", "*.incomplete/*", "*/.*"),
)

# model types whose layers do not add two branches, one after the other, to a residual stream of weight one
PARALLEL = ("cohere", "cohere2", "cohere2_moe", "codegen", "falcon", "gpt_neox", "gptj", "phi", "stablelm")
SCALED_RESIDUAL = ("minimax",)
NORMED_RESIDUAL = ("bert", "distilbert", "roberta")
SINGLE_BRANCH = ("mamba", "mamba2", "nemotron_h", "zamba", "zamba2")
OTHERWISE = {
    **dict.fromkeys(PARALLEL, "runs attention and MLP side by side on one input"),
    **dict.fromkeys(SCALED_RESIDUAL, "scales the residual stream itself"),
    **dict.fromkeys(NORMED_RESIDUAL, "norms the residual stream itself"),
    **dict.fromkeys(SINGLE_BRANCH, "has layers of one branch"),
}


@dataclass(frozen=True)
class HyperConnectionFields:
    """What a conversion lets choose of `HyperConnectionConfig`; the readout that keeps it exact is the mean.

    Raises `ConversionError` for a value that is not accepted.
    """

    hc_mult: int = 4
    connection: str = "dhc"
    hc_tanh: bool = True

    def __post_init__(self):
        if self.hc_mult < 1:
            raise ConversionError(f"{self.hc_mult} residual streams were asked for; give -n 1 or more.")
        if self.connection == "keel":
            raise ConversionError(
                "Keel norms the residual stream itself after every sub-layer, so no pretrained model computes the "
                "same. Train from scratch, with connection='keel' and hc_mult=1 in the config."
            )
        if self.connection not in CONNECTIONS:
            accepted = ", ".join(map(repr, CONNECTIONS))
            raise ConversionError(f"connection {self.connection!r} was asked for; accepted are {accepted}.")
        if self.connection in ("mhc", "ihc") and self.hc_mult < 2:
            raise ConversionError(f"{self.connection} needs at least 2 residual streams; give -n 2 or more.")


@dataclass(frozen=True)
class ConversionPlan:
    """A checked conversion.

    shards: name in the output by name in the base, in order; the hyper-connection shard comes after them.
    companions: files copied unchanged besides the weights.
    bytes_needed: what the output takes on disk beyond what it shares with the base.
    """

    source: Source
    out: Path
    family: Family
    fields: HyperConnectionFields
    base_config: dict
    weights: Weights
    shards: dict[str, str]
    hc_shard: str
    companions: tuple[str, ...]
    link: str
    bytes_needed: int
    bytes_free: int

    @property
    def base_bytes(self) -> int:
        """Size of the base's weight files."""
        return sum(self.source.files[name] for name in self.shards)

    @property
    def hc_parameters(self) -> int:
        """Number of parameters the hyper-connections add."""
        return connection_parameters({**self.base_config, **vars(self.fields)}, len(self.family.norm))

    @property
    def config(self) -> dict:
        """The config.json of the output: the base's, with its new type, classes and connection fields.

        Where older releases of Transformers loaded the base from, which can be a path, is left out.
        """
        architectures = [self.family.architectures[name] for name in _architectures(self.base_config, self.family)]
        base_config = {name: value for name, value in self.base_config.items() if name != "_name_or_path"}
        return {
            **base_config,
            "model_type": self.family.hc_model_type,
            "architectures": architectures,
            "auto_map": self.family.auto_map,
            **vars(self.fields),
            "hc_readout": "mean",
            "hc_sinkhorn_iters": 20,
            "hc_eps": 1e-6,
            "norm": None,
            "norm_alpha_attention": None,
            "norm_alpha_other": None,
            **(
                {"hc_base_model": self.source.name, "hc_base_commit": self.source.commit} if self.source.commit else {}
            ),
        }

    def fingerprint(self) -> list:
        """What an interrupted conversion must have in common with this one to be resumed."""
        files = {name: self.source.files[name] for name in (*self.shards, *self.companions)}
        return json.loads(json.dumps([self.source.name, self.source.commit, files, self.config, self.link]))

    def as_dict(self) -> dict:
        """The plan for machines."""
        return {
            "model": self.source.name,
            "commit": self.source.commit,
            "out": str(self.out),
            "family": self.family.model_type,
            **vars(self.fields),
            "base_parameters": self.weights.parameters,
            "base_bytes": self.base_bytes,
            "hc_parameters": self.hc_parameters,
            "shards": {**self.shards, "(hyper-connections)": self.hc_shard},
            "code": list(self.family.code),
            "companions": list(self.companions),
            "link": self.link,
            "bytes_needed": self.bytes_needed,
            "bytes_free": self.bytes_free,
        }

    def describe(self) -> str:
        """The plan for people."""
        config, commit = self.base_config, f"@{self.source.commit[:7]}" if self.source.commit else ""
        modules = 2 * config["num_hidden_layers"]
        how = {"copy": "copied unchanged", "hard": "hard-linked", "symlink": "linked symbolically"}[self.link]
        share = 100 * self.hc_parameters / self.weights.parameters
        rows = [
            ("base weights", f"{len(self.shards)} file(s), {gigabytes(self.base_bytes)}, {how}"),
            (
                "hc weights",
                f"{modules} modules, n={self.fields.hc_mult}, {self.fields.connection}, float32: "
                f"+{self.hc_parameters:,} parameters (+{share:.3g} %)",
            ),
            ("code", " ".join(self.family.code)),
            ("also copied", " ".join(self.companions) or "nothing"),
            ("output", f"{self.out}: needs {gigabytes(self.bytes_needed)}, {gigabytes(self.bytes_free)} free"),
        ]
        head = (
            f"Plan: {self.source.name}{commit} ({self.family.model_type}, {config['num_hidden_layers']} layers, "
            f"hidden {config['hidden_size']}, {self.weights.dtype})"
        )
        return "\n".join([head, *(f"  {name:<14} {text}" for name, text in rows)])


def plan_conversion(
    model: str,
    out: str | os.PathLike | None = None,
    *,
    fields: HyperConnectionFields = HyperConnectionFields(),
    revision: str | None = None,
    link: str = "copy",
    force: bool = False,
) -> ConversionPlan:
    """Decide how MODEL becomes OUT, and refuse what can't be converted; nothing is written.

    model: local folder or Hub id.
    out: folder to make; by default the model's name followed by `-HCx<n>`, here.
    fields: the hyper-connections to add.
    revision: of a Hub repo.
    link: "copy", "hard" or "symlink": how base shards reach OUT.
    force: whether OUT may exist.

    Raises `UnsupportedCheckpointError` for a model that can't be converted, `ConversionError` for an OUT that can't be
    written.
    """
    if link not in LINKS:
        raise ConversionError(f"link {link!r} was asked for; accepted are {', '.join(map(repr, LINKS))}.")
    source = open_source(model, revision)
    config = read_config(source)
    family = _family(source, config)
    if fields.connection == "frac" and config["hidden_size"] % fields.hc_mult:
        raise ConversionError(
            f"the hidden size of {source.name!r}, {config['hidden_size']}, can't be cut into {fields.hc_mult} equal "
            f"parts. Give another -n."
        )
    weights = read_weights(source)
    if weights.prefix is None:
        raise UnsupportedCheckpointError(
            f"the weights of {source.name!r} hold no decoder layer 0. Give a complete checkpoint."
        )
    count = len(weights.files) + 1
    shards = {name: f"model-{i:05}-of-{count:05}.safetensors" for i, name in enumerate(weights.files, start=1)}
    companions = companions_of(source)
    if outside := [name for name in companions if name.startswith("/") or ".." in name.split("/")]:
        raise UnsupportedCheckpointError(f"{source.name!r} lists {outside[0]!r}, a path outside it. Do not trust it.")
    out = Path(out) if out is not None else Path(f"{Path(os.path.abspath(model)).name}-HCx{fields.hc_mult}")
    plan = ConversionPlan(
        source=source,
        out=out,
        family=family,
        fields=fields,
        base_config=config,
        weights=weights,
        shards=shards,
        hc_shard=f"model-{count:05}-of-{count:05}.safetensors",
        companions=companions,
        link=link,
        bytes_needed=0,
        bytes_free=0,
    )
    return _with_space_checked(plan, force)


def workspace(out: Path) -> Path:
    """The folder beside OUT in which a conversion works until it is complete."""
    return out.parent / f".{out.name}.incomplete"


def gigabytes(count: int) -> str:
    """A number of bytes for people."""
    for unit in ("bytes", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def _family(source: Source, config: dict) -> Family:
    model_type, name = config.get("model_type"), source.name
    accepted = ", ".join(FAMILIES)
    if "hc_mult" in config or str(model_type).startswith("hc_"):
        raise UnsupportedCheckpointError(
            f"{name!r} is already a hyper-connection model (n={config.get('hc_mult')}). Convert its base instead."
        )
    if model_type in OTHERWISE:
        raise UnsupportedCheckpointError(
            f"{name!r} can't be converted: {model_type} {OTHERWISE[model_type]}; hyper-connections stand for two "
            f"additions, one after the other, to a residual stream. Convert one of: {accepted}."
        )
    if model_type not in FAMILIES:
        raise UnsupportedCheckpointError(
            f"{name!r} has model_type {model_type!r}; hf-hyperconn converts: {accepted}. "
            f"Load another with Transformers and try hf_hyperconn.convert_model, which converts in memory."
        )
    if (quantised := config.get("quantization_config")) is not None:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise UnsupportedCheckpointError(
            f"{name!r} is quantised (quant_method={method}); convert the full-precision checkpoint instead."
        )
    if "auto_map" in config:
        raise UnsupportedCheckpointError(
            f"{name!r} brings code of its own (auto_map), which is not run; convert a checkpoint of Transformers' own "
            f"{model_type}."
        )
    family = FAMILIES[model_type]
    for architecture in _architectures(config, family):
        if architecture not in family.architectures:
            raise UnsupportedCheckpointError(
                f"{name!r} is a {architecture}; hf-hyperconn converts: {', '.join(family.architectures)}."
            )
    for field in ("num_hidden_layers", "hidden_size"):
        if not isinstance(config.get(field), int):
            raise UnsupportedCheckpointError(f"{CONFIG} of {name!r} has no {field}. Download it again.")
    return family


def companions_of(source: Source) -> tuple[str, ...]:
    """The files that come along with weights, code, config and card: tokenizer, chat template, licence and the like.

    That is all but `LEFT_BEHIND` and other models in folders of the checkpoint.
    """
    models = tuple(name.removesuffix(CONFIG) for name in source.files if name.endswith(f"/{CONFIG}"))
    left = [name for name in source.files if name.startswith(models) or any(fnmatch(name, p) for p in LEFT_BEHIND)]
    return tuple(sorted(set(source.files) - set(left)))


def _architectures(config: dict, family: Family) -> list[str]:
    return config.get("architectures") or [f"{family.name}ForCausalLM"]


def _with_space_checked(plan: ConversionPlan, force: bool) -> ConversionPlan:
    parent = plan.out.absolute().parent
    if plan.out.is_symlink() or plan.out.exists():
        if not force:
            raise ConversionError(f"'{plan.out}' already exists. Choose another OUT, or replace it with --force.")
        if not (plan.out / RECORD).is_file():
            raise ConversionError(
                f"'{plan.out}' is no converted checkpoint (no {RECORD}), so --force does not replace it. Remove it."
            )
    if not parent.is_dir():
        raise ConversionError(f"there is no folder '{parent}' to write '{plan.out.name}' in. Make it first.")
    if not os.access(parent, os.W_OK | os.X_OK):
        raise ConversionError(f"no permission to write in '{parent}'. Choose another OUT.")
    kept = sum(plan.source.files[name] for name in plan.companions)
    needed = kept + 4 * plan.hc_parameters + 2**20
    if plan.link == "copy":
        work = workspace(plan.out)
        done = {target for target in plan.shards.values() if (work / target).is_file()}
        needed += sum(plan.source.files[name] for name, target in plan.shards.items() if target not in done)
    cache, download = plan.source.to_download([*plan.shards, *plan.companions])
    if download and os.stat(cache).st_dev == os.stat(parent).st_dev:
        needed += download
    elif download > (cache_free := shutil.disk_usage(cache).free):
        raise ConversionError(
            f"downloading {plan.source.name!r} needs {gigabytes(download)} in '{cache}', "
            f"{gigabytes(cache_free)} free. Free some space, or set HF_HOME elsewhere."
        )
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise ConversionError(
            f"needs {gigabytes(needed)} in '{parent}', {gigabytes(free)} free. Free some space, or use --link hard."
        )
    return replace(plan, bytes_needed=needed, bytes_free=free)
