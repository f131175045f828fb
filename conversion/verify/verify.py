"""The command `verify`: a hyper-connection checkpoint by itself, by its record and beside its base."""

import hashlib
import os
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_hyperconn.errors import HyperConnError, UnsupportedCheckpointError, VerificationError
from hf_hyperconn.families.family import configs_of_stacks, usual_names
from hf_hyperconn.kinds import kind_of
from hf_hyperconn.models.connection_fields import inequivalence, one_of
from hf_hyperconn.models.sub_layers import is_of_connection

from ..checkpoint.checkpoint import Checkpoint, open_conversion
from ..checkpoint.checkpoint_files import (
    INDEX,
    open_tensors,
    read_raw_config,
    read_weight_map,
    refuse_other_weights,
)
from ..checkpoint.model_code import code_fault
from ..checkpoint.record import shards_without_digest
from ..checkpoint.sizes import fault_of_sizes
from ..checkpoint.source import CONFIG, Source, open_source
from ..files.reading import TensorInfo
from ..files.writing import file_digest
from ..terminal import name_some
from .changed_files import FileChange, config_differences, find_changes

if TYPE_CHECKING:
    import torch

    from .numeric import Comparison

MODES = ("auto", "full", "structure")


@dataclass(frozen=True)
class VerificationReport:
    """The findings of a verification.

    tensors: number of tensors of the checkpoint.
    trained: whether its hyper-connections have left the equivalent initialization; None if not known.
    as_converted: whether it is a conversion that nobody has trained and saved since.
    changed: number of tensors that differ from the base's; None without a base.
    comparisons: one for each dtype in which both models ran; empty without a numeric verification.
    layers: (run, all) decoder layers of the numeric verification.
    changes: changed files of code, config and companions.
    notes: other facts of the files.
    failure: the reason why verification fails; None if it passes.
    """

    tensors: int
    trained: bool | None
    changed: int | None
    comparisons: "tuple[Comparison, ...]" = ()
    layers: tuple[int, int] | None = None
    as_converted: bool = False
    changes: tuple[FileChange, ...] = ()
    notes: tuple[str, ...] = ()
    failure: str | None = None

    @property
    def passed(self) -> bool:
        """Tell whether there is no failure; a trained checkpoint may differ from its base in any way."""
        return self.failure is None

    def lines(self) -> list[str]:
        """Return the report for people."""
        state = "whether the hyper-connections are trained is not known"
        if self.trained is not None:
            state = f"the hyper-connections are {'trained' if self.trained else 'at the equivalent initialization'}"
        lines = [f"structure     {self.tensors} tensors; {state}"]
        if self.changed is not None:
            same = "the same bytes as the base's" if self.changed == 0 else f"{self.changed} differ from the base's"
            lines.append(f"base tensors  {same}")
        if self.layers:
            run, total = self.layers
            lines.append(
                f"layers        {'all' if run == total else 'the first'} {run}{f' of {total}' * (run < total)}"
            )
        lines += [comparison.line() for comparison in self.comparisons]
        lines += [f"changed       {change}" for change in self.changes]
        return lines + [f"note          {note}" for note in self.notes]

    def as_dict(self) -> dict:
        """Return the report for machines."""
        return {**asdict(self), "passed": self.passed}

    @classmethod
    def from_dict(cls, report: dict) -> "VerificationReport":
        """Return the report of a result of `as_dict`, also after JSON."""
        from .numeric import Comparison

        fields = {name: value for name, value in report.items() if name != "passed"}
        return cls(
            **{
                **fields,
                "comparisons": tuple(Comparison(**comparison) for comparison in fields["comparisons"]),
                "layers": fields["layers"] and tuple(fields["layers"]),
                "changes": tuple(FileChange(**change) for change in fields["changes"]),
                "notes": tuple(fields["notes"]),
            }
        )


def fault_of_mode(mode: str, layers: int | None, modes: tuple[str, ...] = MODES) -> str | None:
    """Find a fault of an unknown mode, or of layers in a mode that runs none."""
    if mode not in modes:
        return f"mode must be {one_of(modes)} (got {mode!r})."
    if layers is not None and mode in ("structure", "off"):
        return f"layers must be None with mode {mode!r}, which runs none (got {layers}). Leave one of them out."
    return None


def verify_checkpoint(
    folder: str | Path,
    against: str | Source | None = None,
    *,
    revision: str | None = None,
    mode: str = "auto",
    layers: int | None = None,
    fresh: bool = False,
    accept_changes: bool = False,
) -> VerificationReport:
    """Check a hyper-connection checkpoint, and compare it with its base.

    An untrained conversion fails when its code, config or index differs from its record, or its config from the
    base's. Other differences of files are reported.

    folder: of the hyper-connection checkpoint.
    against: the base, a folder or a Hub id; None to check the folder alone.
    revision: branch, tag or commit of `against` on the Hub.
    mode: "structure" checks tensors and files; "full" also runs both models, one after the other, in the checkpoint's
        dtype and in float32; "auto" does so with as many of the first layers as fit in free memory.
    layers: number of the first layers to run.
    fresh: whether the converter has just made the folder from `against`, and compared the shards. The folder must then
        be at the equivalent initialization.
    accept_changes: whether changes of code, config and index are only reported.

    Raises `UnsupportedCheckpointError` when either can't be read or `folder` is no hyper-connection checkpoint. Raises
    `HyperConnError` for an unknown mode, and for `layers` in a mode that runs none.
    """
    if fault := fault_of_mode(mode, layers):
        raise HyperConnError(fault)
    target = open_conversion(folder)
    if reason := inequivalence(target.config):
        raise UnsupportedCheckpointError(
            f"'{folder}' was trained from scratch: no base gives the same outputs ({reason}), so there is nothing to "
            f"verify."
        )
    weights, record = target.weights, target.record
    refuse_other_weights(target.source, target.config)
    failure, trained = _check_alone(target)
    as_converted = record is not None and (trained is False or _has_its_connections(target.source, record))
    changes, notes = find_changes(
        target, as_converted=as_converted, digest_of=lambda name: _digest(target.source, name)
    )
    changed_file = None if accept_changes else next((str(change) for change in changes if change.fails), None)
    report = VerificationReport(
        len(weights.tensors),
        trained,
        None,
        as_converted=as_converted,
        changes=changes,
        notes=notes,
        failure=failure,
    )
    against = open_source(against, revision) if isinstance(against, str) else against
    if failure or against is None:
        if failure or changed_file or (trained and not as_converted):
            return replace(report, failure=failure or changed_file)
        if record and (shards := shards_without_digest(record)):
            note = f"base weights not compared: no digest was recorded of {name_some(shards)} (--against BASE does)"
            notes = (*notes, note)
        return replace(report, failure=_damage(target.source, record), notes=notes)
    base = Checkpoint(against, read_raw_config(against), target.family)
    refuse_other_weights(against, base.raw_config)
    report = _compare_tensors(report, target, base, changed_file, fresh)
    if report.failure and record and (other := _recorded_base(record, against)):
        return replace(report, failure=f"{report.failure}. {other}")
    if report.failure or mode == "structure":
        return report
    if _tokens_if_resized(target, base, trained):
        return replace(report, notes=(*report.notes, "logits not compared: they are of other tokens than the base's"))
    return _compare_outputs(report, target, base, mode, layers)


def _recorded_base(record: dict, against: Source) -> str | None:
    """Say that the record names another base; None where both have the same name."""
    recorded, commit = record["base"]["model"], record["base"]["commit"]
    if recorded in (against.name, Path(os.path.realpath(against.name)).name):
        return None
    return f"The record names another base: {recorded!r}{f' at {commit}' if commit else ''} (got {against.name!r})"


def _compare_outputs(
    report: VerificationReport, target: Checkpoint, base: Checkpoint, mode: str, layers: int | None
) -> VerificationReport:
    """Run both models; arguments as for `verify_checkpoint`."""
    from .numeric import compare_models, layers_that_fit

    total = max(config["num_hidden_layers"] for config in configs_of_stacks(target.config))
    run = min(layers or (total if mode == "full" else layers_that_fit(target.weights, total)), total)
    try:
        comparisons = compare_models(target, base, layers=run)
    except VerificationError as error:
        return replace(report, failure=str(error))
    failure = None
    if not report.trained:
        rounded = kind_of(target.config).is_rounded
        failure = next((c.failure() for c in comparisons if not (c.equal or (rounded and c.rounded))), None)
    return replace(report, comparisons=comparisons, layers=(run, total), failure=failure)


def _compare_tensors(
    report: VerificationReport, target: Checkpoint, base: Checkpoint, changed_file: str | None, fresh: bool
) -> VerificationReport:
    """Compare tensors and config with the base's.

    changed_file: a change of a file that fails a conversion.
    fresh: as for `verify_checkpoint`.
    """
    trained, tokens = report.trained, _tokens_if_resized(target, base, report.trained)
    renamed = None if report.as_converted else _renamed(target, base)
    failure = _check_headers(target, base, trained, renamed, tokens)
    differences = [f"{CONFIG}: {difference}" for difference in config_differences(target, base.raw_config)]
    if report.as_converted:
        failure = failure or next(iter(differences), None)
    else:
        report = replace(report, notes=(*report.notes, *differences))
    failure = failure or changed_file
    changed = None if fresh or failure else _count_changed(target, base)
    if fresh and trained:
        failure = failure or "the hyper-connections are not at the equivalent initialization"
    if changed and not trained:
        failure = failure or f"{changed} tensors differ from the base's, though the hyper-connections are untrained"
    return replace(report, changed=changed, failure=failure)


def _tokens_if_resized(target: Checkpoint, base: Checkpoint, trained: bool | None) -> tuple[int, int] | None:
    """Return the numbers of tokens of a trained checkpoint and its base if they differ, else None."""
    tokens: Any = target.config.get("vocab_size"), usual_names(base.raw_config).get("vocab_size")
    return tokens if trained and None not in tokens and tokens[0] != tokens[1] else None


def _check_alone(target: Checkpoint) -> tuple[str | None, bool | None]:
    """Find a fault of the checkpoint by itself, and tell whether its hyper-connections have been trained.

    The second value is None with a fault.
    """
    from .start import fault_of_connections, measure_drift

    if failure := code_fault(target):
        return failure, None
    source, weights = target.source, target.weights
    listed = read_weight_map(source) if INDEX in source.files and len(weights.files) > 1 else weights.tensors
    if unlisted := weights.tensors.keys() - listed.keys():
        return f"{INDEX} does not list {min(unlisted)}", None
    if failure := fault_of_sizes(target) or fault_of_connections(target):
        return failure, None
    from ..checkpoint.loading import fault_by_headers  # with torch, which is not needed before

    if unfit := fault_by_headers(target):
        return str(unfit), None
    with open_tensors(source, weights, "numpy") as read:
        has_changed, *_ = measure_drift(read, target)
    return None, has_changed


def _has_its_connections(target: Source, record: dict) -> bool:
    """Tell whether the shard of connections is the conversion's, by its recorded digest."""
    name = record.get("hyper_connection_shard")
    return name in target.files and _digest(target, name) == record.get("hyper_connection_sha256")


def _damage(target: Source, record: dict | None) -> str | None:
    """Find a base shard that differs from its recorded digest."""
    for shard in record["base_shards"] if record else ():
        name, expected = shard["file"], shard["sha256"]
        if name not in target.files or (expected is not None and _digest(target, name) != expected):
            return f"{name} is not as the conversion wrote it"
    return None


def _digest(source: Source, name: str) -> str:
    """Return the SHA-256 of a file. Raises `UnsupportedCheckpointError` when it can't be read."""
    try:
        return file_digest(source.path(name))
    except OSError as error:
        raise UnsupportedCheckpointError(
            f"can't read {name} of {source.name!r}: {error.strerror}. Fix that."
        ) from error


def _renamed(target: Checkpoint, base: Checkpoint) -> frozenset[str]:
    """Return the tensors with other names than in the base: saving uses the installed Transformers' names.

    The set is empty where Transformers doesn't load the whole base.
    """
    from ..checkpoint.loading import fault_by_headers

    names = frozenset(_base_tensors(target) - base.weights.tensors.keys())
    return frozenset() if not names or fault_by_headers(base) else names


def _base_tensors(target: Checkpoint) -> set[str]:
    """Return the names of a conversion's tensors that are not of connections."""
    return {name for name in target.weights.tensors if not is_of_connection(name)}


def _check_headers(
    target: Checkpoint,
    base: Checkpoint,
    trained: bool | None,
    renamed: frozenset[str] | None,
    tokens: tuple[int, int] | None,
) -> str | None:
    """Find a fault of the tensors taken from the base, by their headers.

    Training may have changed dtypes, and saving may have left out tensors that the model does not know.

    renamed: the tensors of `_renamed`; None for a conversion that nobody has saved since.
    tokens: numbers of tokens of the checkpoint and the base, where they may differ.
    """
    ours, theirs = _base_tensors(target), base.weights.tensors
    for name in sorted((ours ^ theirs.keys()) - (renamed or frozenset())):
        if name in ours or (renamed is None and not trained):
            return f"{name} is missing in {'the base' if name in ours else 'the checkpoint'}"
    for name in sorted(ours & theirs.keys()):
        tensor, expected = target.weights.tensors[name], theirs[name]
        if tokens is not None and (tensor.shape, expected.shape) == tuple((n, *tensor.shape[1:]) for n in tokens):
            continue
        if tensor.shape != expected.shape or (tensor.dtype != expected.dtype and not trained):
            return (
                f"{name} is {tensor.dtype} {list(tensor.shape)}, in the base {expected.dtype} {list(expected.shape)}"
            )
    return None


def _count_changed(target: Checkpoint, base: Checkpoint) -> int:
    """Count the tensors of the base that differ in their bytes, by their names or else by any name."""
    import torch
    from huggingface_hub.utils import tqdm

    def form(tensor: TensorInfo) -> tuple:
        return tensor.dtype, tensor.shape

    weights, base_weights = target.weights, base.weights
    renamed = _base_tensors(target) - base_weights.tensors.keys()
    forms = {form(weights.tensors[name]) for name in renamed}
    changed, contents = 0, set()
    with (
        tqdm(total=base_weights.nbytes, unit="B", unit_scale=True, desc="Comparing tensors", disable=None) as bar,
        open_tensors(base.source, base_weights, "torch") as theirs,
        open_tensors(target.source, weights, "torch") as ours,
    ):
        for name, tensor in base_weights.tensors.items():
            if name in weights.tensors:
                a, b = theirs(name).flatten(), ours(name).flatten()
                changed += not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            if form(tensor) in forms:
                contents.add((*form(tensor), _content(theirs(name))))
            bar.update(tensor.nbytes)
        changed += sum((*form(weights.tensors[name]), _content(ours(name))) not in contents for name in renamed)
    return changed


def _content(tensor: "torch.Tensor") -> bytes:
    """Return the SHA-256 of a tensor's bytes."""
    import torch

    return hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().data).digest()
