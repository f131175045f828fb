"""`hf-hyperconn inspect`: facts of a checkpoint with connections, from its config and the headers of its weights."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import TYPE_CHECKING

from hf_hyperconn.analysis.costs import (
    EXPERT,
    EXPERTS,
    EXPERTS_A_TOKEN,
    base_flops,
    connection_flops,
    experts_of_a_token,
    kept_bytes,
    number_of_experts,
    weights_that_run,
)
from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.families.family import configs_of_stacks
from hf_hyperconn.families.reading.classes import FamilyName
from hf_hyperconn.kinds import FIELDS, kind_of
from hf_hyperconn.models.connection_fields import inequivalence
from hf_hyperconn.models.sub_layers import is_of_connection

from .checkpoint.checkpoint import Checkpoint, open_conversion
from .checkpoint.checkpoint_files import open_tensors
from .checkpoint.model_code import cuts_of, size_of_code
from .checkpoint.record import base_of
from .checkpoint.source import CONFIG, LocalSource, open_source
from .files.reading import is_size
from .terminal import written_bytes

if TYPE_CHECKING:
    from .verify.start import Drift

ITEM_SIZES = {"F64": 8, "F32": 4}  # of others, 2: quantized models compute in 16 bits
CAPTION = "Largest change of static weights: alpha reads or mixes, beta writes. Size of the dynamic part of either."
TITLES = {"mlp": "MLP", "attn": "attention", "cross_attn": "cross-attention"}
UNITS = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"))


@dataclass(frozen=True)
class Inspection:
    """Facts of a checkpoint with connections.

    name: as the user gave it.
    family: as Transformers spells it in class names.
    stack: the inner model with the connections, where `--stack` chose it.
    layers: number of layers with connections.
    fields: all fields of its connections, with defaults where its config lacks them.
    dtype: dtype of most weights, as safetensors spells it.
    quantized: the method of a quantized checkpoint; None otherwise.
    base, commit: the base and its commit, where they are recorded.
    code_files, code_lines: number of files of code, and of their lines that are not empty.
    cut_from: the releases of Transformers that the code was cut from; empty where it fits all releases.
    parameters: number of all stored parameters; None when quantization packs them.
    added_parameters: number of the connections' parameters.
    flops: operations of one token's forward; None like `parameters`.
    added_flops: operations of the connections among them, see `connection_flops`.
    added_memory: bytes a token that the connections keep for the backward, see `kept_bytes`.
    trained: whether the connections have left the equivalent initialization; None if not known.
    not_known: the reason why `trained` is not known.
    drift: distance from the equivalent initialization by sub-layer; None where values were not read.
    readout_drift: the largest change of the readout's parameters; None without any, and where values were not read.
    """

    name: str
    family: str
    stack: str | None
    model_type: str
    connection: str
    hc_mult: int
    fields: dict
    layers: int
    hidden_size: int
    dtype: str
    quantized: str | None
    base: str | None
    commit: str | None
    code_files: int
    code_lines: int
    cut_from: tuple[str, ...]
    parameters: int | None
    added_parameters: int
    flops: int | None
    added_flops: int
    added_memory: int
    trained: bool | None
    not_known: str | None
    drift: "tuple[Drift, ...] | None"
    readout_drift: float | None

    def lines(self) -> list[str]:
        """Return the inspection for people."""
        commit = f"@{self.commit[:7]}" if self.commit else ""
        where = f" ({self.stack})" if self.stack else ""
        model = f"{self.name}: {self.family}{where}, {self.layers} layers, hidden {self.hidden_size}, {self.dtype}"
        if self.trained is None:
            state = f"not known: {self.not_known}"
        else:
            state = f"the hyper-connections are {'trained' if self.trained else 'at the equivalent initialization'}"
        rows = [
            ("model", f"{model}, quantized by {self.quantized}" if self.quantized else model),
            ("connection", ", ".join([self.connection, *kind_of(self.fields).settings(self.fields)])),
            ("base", f"{self.base}{commit}" if self.base else "not recorded"),
            ("code", f"{self.code_files} files, {self.code_lines:,} lines, {_code_origin(self.cut_from)}"),
            ("parameters", _with_share(self.parameters, self.added_parameters, "{:,}".format)),
            ("FLOPs", f"{_with_share(self.flops, self.added_flops, written_count)}, a token, forward"),
            (
                "activations",
                f"+{written_bytes(self.added_memory)} a token kept for the backward, without recomputation",
            ),
            ("state", state),
        ]
        lines = [f"{name:<13} {text}" for name, text in rows]
        if not (self.trained and self.drift):
            return lines
        readout = [] if self.readout_drift is None else [f"readout {self.readout_drift:.3g}, its largest change"]
        return [*lines, *_table(self.drift), *readout]

    def as_dict(self) -> dict:
        """Return the inspection for machines."""
        return asdict(self)


def _code_origin(cut_from: tuple[str, ...]) -> str:
    """Name the releases of Transformers that run the code of a checkpoint."""
    if not cut_from:
        return "runs with every supported release of Transformers"
    return f"cut from Transformers {', '.join(cut_from)}; releases with the same layers run it, others refuse it"


def inspect_checkpoint(model: str, revision: str | None = None) -> Inspection:
    """Inspect a checkpoint with hyper-connections.

    model: local folder or Hub id. Of a Hub repo only headers of weights, small JSON files and code are fetched.
    revision: branch, tag or commit of a Hub repo.

    Raises `UnsupportedCheckpointError` when it can't be read or has no hyper-connections.
    """
    return inspection_of(open_conversion(open_source(model, revision)))


def inspection_of(checkpoint: Checkpoint) -> Inspection:
    """Inspect an open checkpoint; errors as for `inspect_checkpoint`."""
    config, family, weights, record = checkpoint.config, checkpoint.family, checkpoint.weights, checkpoint.record
    quantized, flops = quantization_method(config), flops_of_base(checkpoint)
    base, commit = base_of(config, record)
    added_flops = connection_flops(config)
    trained, not_known, drift, readout_drift = _training_of(checkpoint)
    code_files, code_lines = size_of_code(checkpoint)
    return Inspection(
        name=checkpoint.name,
        family=family.name,
        stack=FamilyName.of(family.model_type).stack,
        model_type=config["model_type"],
        connection=config["connection"],
        hc_mult=config["hc_mult"],
        fields=fields_of(checkpoint),
        layers=sum(stack["num_hidden_layers"] for stack in configs_of_stacks(config)),
        hidden_size=config["hidden_size"],
        dtype=weights.dtype,
        quantized=quantized,
        base=base,
        commit=commit,
        code_files=code_files,
        code_lines=code_lines,
        cut_from=tuple(dict.fromkeys(cut.release for cut in cuts_of(checkpoint))),
        parameters=None if quantized else weights.parameters,
        added_parameters=sum(tensor.size for name, tensor in weights.tensors.items() if is_of_connection(name)),
        flops=None if quantized else flops + added_flops,
        added_flops=added_flops,
        added_memory=kept_bytes(config, ITEM_SIZES.get(weights.dtype, 2)),
        trained=trained,
        not_known=not_known,
        drift=drift,
        readout_drift=readout_drift,
    )


def flops_of_base(checkpoint: Checkpoint) -> int:
    """Return the operations of one token's forward without connections.

    Raises `UnsupportedCheckpointError` for connections alone. Raises it also for a mixture of experts whose config
    lacks their number, or the number of experts a token.
    """
    config, weights = checkpoint.config, checkpoint.weights
    is_mixture = any(map(EXPERT.search, filter(weights_that_run(config, weights.tensors), weights.tensors)))
    counts = [experts_of_a_token(config), number_of_experts(config)]
    if is_mixture and not all(map(is_size, counts)):
        raise UnsupportedCheckpointError(
            f"{CONFIG} of {checkpoint.name!r} does not say how many experts there are and how many a token meets "
            f"({' or '.join(EXPERTS)}, and {' or '.join(EXPERTS_A_TOKEN)}). Download it again."
        )
    flops = base_flops(config, {name: tensor.shape for name, tensor in weights.tensors.items()})
    if flops == 0:
        raise UnsupportedCheckpointError(
            f"the weights of {checkpoint.name!r} are connections alone. Give a complete checkpoint."
        )
    return flops


def quantization_method(config: dict) -> str | None:
    """Return the name of the method that packed a model's weights; None without one."""
    settings = config.get("quantization_config")
    if settings is None:
        return None
    return str(settings.get("quant_method")) if isinstance(settings, dict) else "an unnamed method"


def _training_of(
    checkpoint: Checkpoint,
) -> "tuple[bool | None, str | None, tuple[Drift, ...] | None, float | None]":
    """Return `trained`, `not_known`, `drift` and `readout_drift` of an `Inspection`."""
    if reason := inequivalence(checkpoint.config):
        return None, f"this is trained from scratch and has no equivalent initialization ({reason})", None, None
    from .verify.start import fault_of_connections, measure_drift

    if reason := fault_of_connections(checkpoint):
        return None, reason, None, None
    if isinstance(checkpoint.source, LocalSource):
        with open_tensors(checkpoint.source, checkpoint.weights, "numpy") as read:
            trained, drift, readout_drift = measure_drift(read, checkpoint)
        return trained, None, drift, readout_drift
    if (is_trained := _is_trained_by_digest(checkpoint)) is None:
        return None, "that would need its weights, which were not downloaded", None, None
    return is_trained, None, None, None


def _is_trained_by_digest(checkpoint: Checkpoint) -> bool | None:
    """Tell whether the file of connections differs from its recorded digest; None if not known."""
    digests, weights, record = checkpoint.source.sha256, checkpoint.weights, checkpoint.record or {}
    file, digest = record.get("hyper_connection_shard"), record.get("hyper_connection_sha256")
    held = {name for name, tensor in weights.tensors.items() if tensor.file == file}
    if digest is None or file not in digests or held != set(filter(is_of_connection, weights.tensors)):
        return None
    return digests[file] != digest


def _with_share(total: int | None, added: int, shown: Callable[[int], str]) -> str:
    if total is None:
        return f"+{shown(added)} by the connections (the base's are not known: it is quantized)"
    return f"{shown(total)}, +{100 * added / (total - added):.3g} % by the connections ({shown(added)})"


def fields_of(checkpoint: Checkpoint) -> dict:
    """Return all fields of a conversion's connections, with defaults where its config lacks them."""
    return {name: checkpoint.config.get(name, default) for name, default in FIELDS.items()}


def written_count(count: int) -> str:
    """Write a number for people."""
    unit, letter = next(((unit, letter) for unit, letter in UNITS if count >= unit), (1, ""))
    return f"{count / unit:.4g} {letter}".rstrip()


def _table(drift: "tuple[Drift, ...]") -> list[str]:
    """Return a table for each list of layers: a line a layer, columns for each sub-layer."""
    head, lines = f"{'alpha':>9} {'beta':>9} {'dynamic':>9}", ["", CAPTION]
    for stack, stack_drift in groupby(drift, lambda part: part.stack):
        layers = [(layer, list(parts)) for layer, parts in groupby(stack_drift, lambda part: part.layer)]
        names = [TITLES.get(part.sub_layer, part.sub_layer) for part in layers[0][1]]
        lines += ["", f"{stack or 'drift':<5} " + " ".join(f"{name:>29}" for name in names)]
        lines.append(" ".join(["layer", *[head] * len(names)]))
        for layer, parts in layers:
            values = (value for part in parts for value in (part.alpha, part.beta, part.dynamic))
            lines.append(f"{layer:<5} " + " ".join(f"{value:>9.3g}" for value in values))
    return lines
