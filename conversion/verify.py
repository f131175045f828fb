"""Whether a hyper-connection checkpoint is what it should be, and computes what its base computes."""

import hashlib
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hf_hyperconn.errors import HyperConnError, UnsupportedCheckpointError, VerificationError
from hf_hyperconn.families.family import configs_of_stacks, usual_names
from hf_hyperconn.kinds import kind_of
from hf_hyperconn.models.connection_fields import inequivalence
from hf_hyperconn.models.sub_layers import is_of_connection

from .checkpoint.checkpoint import Checkpoint, open_conversion
from .checkpoint.checkpoint_files import (
    INDEX,
    Weights,
    open_tensors,
    read_weight_map,
    read_written_config,
    refuse_other_weights,
)
from .checkpoint.model_code import code_fault
from .checkpoint.record import shards_without_digest
from .checkpoint.sizes import fault_of_sizes
from .checkpoint.source import CONFIG, Source, open_source
from .files.reading import TensorInfo
from .files.transfer import digest
from .terminal import named
from .verification.changed_files import FileChange, config_differences, find_changes

if TYPE_CHECKING:
    import torch

    from .verification.numeric import Comparison

MODES = ("auto", "full", "structure")


@dataclass(frozen=True)
class VerificationReport:
    """What a verification found.

    tensors: how many tensors the checkpoint holds.
    trained: whether its hyper-connections have left the equivalent initialisation; None when that is not known.
    as_converted: whether it is a conversion that nobody has trained and saved since.
    changed: base tensors that differ from the base's; None when there was no base to compare with.
    comparisons: one for each dtype in which both models ran; empty without a numeric verification.
    layers: (run, all) decoder layers of the numeric verification.
    changes: code, config and companions that are not as they were written.
    notes: what else is worth knowing of the files.
    failure: what is wrong, or None.
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
        """A trained checkpoint passes whatever its distance from its base."""
        return self.failure is None

    def lines(self) -> list[str]:
        """The report for people."""
        state = "whether the hyper-connections are trained is not known"
        if self.trained is not None:
            state = f"the hyper-connections are {'trained' if self.trained else 'at the equivalent initialisation'}"
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
        """The report for machines."""
        return {**asdict(self), "passed": self.passed}

    @classmethod
    def from_dict(cls, report: dict) -> "VerificationReport":
        """What `as_dict` made, also when it has been JSON since."""
        from .verification.numeric import Comparison

        fields = {name: value for name, value in report.items() if name != "passed"}
        return cls(
            **{
                **fields,
                "comparisons": tuple(Comparison(**each) for each in fields["comparisons"]),
                "layers": fields["layers"] and tuple(fields["layers"]),
                "changes": tuple(FileChange(**each) for each in fields["changes"]),
                "notes": tuple(fields["notes"]),
            }
        )


def fault_of_mode(mode: str, layers: int | None, modes: tuple[str, ...] = MODES) -> str | None:
    """What is wrong with a mode that is not one of these, or with layers where none are run; None if nothing is."""
    if mode not in modes:
        return f"mode {mode!r} was asked for; accepted are {', '.join(map(repr, modes))}."
    if layers is not None and mode in ("structure", "off"):
        return f"layers={layers} was asked for, but with {mode!r} no layers are run: leave one of them out."
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

    A conversion fails, unless it was trained, when its code, config or index is not what it recorded of them, or its
    config differs from the base's. Other differences of files are reported.

    folder: of the hyper-connection checkpoint.
    against: its Pre-Norm base, a folder or a Hub id; without it only the folder itself is checked.
    revision: of `against`, when it is a Hub repo.
    mode: "structure" checks tensors and files; "full" also runs both models, one after the other, in the checkpoint's
        dtype and in float32; "auto" does so with as many of the first layers as fit in free memory.
    layers: run only this many of the first layers.
    fresh: the folder was just made from `against` by the converter, which compares the shards itself, so it must be at
        the equivalent initialisation.
    accept_changes: whether code, config and index that differ from the record are only reported, too.

    Raises `UnsupportedCheckpointError` when either can't be read or `folder` is no hyper-connection checkpoint, and
    `HyperConnError` for an unknown mode, or layers where none are run.
    """
    if fault := fault_of_mode(mode, layers):
        raise HyperConnError(fault)
    target = open_conversion(folder)
    if reason := inequivalence(target.config):
        raise UnsupportedCheckpointError(
            f"'{folder}' was trained from scratch: no base computes what it does ({reason}), so there is nothing to "
            f"verify."
        )
    weights, record = target.weights, target.record
    refuse_other_weights(target.source, target.config)
    failure, trained = _check_own(target)
    as_converted = record is not None and (trained is False or _has_its_connections(target.source, record))
    changes, notes = find_changes(
        target, as_converted=as_converted, digest_of=lambda name: _digest(target.source, name)
    )
    changed_file = None if accept_changes else next((str(change) for change in changes if change.fails), None)
    report = VerificationReport(
        len(weights.tensors), trained, None, as_converted=as_converted, changes=changes, notes=notes, failure=failure
    )
    against = open_source(against, revision) if isinstance(against, str) else against
    if failure or against is None:
        if failure or changed_file or (trained and not as_converted):
            return replace(report, failure=failure or changed_file)
        if record and (unknown := shards_without_digest(record)):
            note = f"base weights not compared: no digest was recorded of {named(unknown)} (--against BASE does)"
            notes = (*notes, note)
        return replace(report, failure=_damage(target.source, record), notes=notes)

    base = Checkpoint(against, read_written_config(against), target.family)
    refuse_other_weights(against, base.written)
    tokens: Any = target.config.get("vocab_size"), usual_names(base.written).get("vocab_size")
    is_resized = trained and None not in tokens and tokens[0] != tokens[1]  # as for the tokens of a chat
    others = None if as_converted else _renamed(target, base)
    failure = _check_against(weights, base.weights, trained, others, tokens if is_resized else None)
    differences = [f"{CONFIG}: {found}" for found in config_differences(target, base.written)]
    if as_converted:
        failure = failure or next(iter(differences), None)
    else:
        report = replace(report, notes=(*notes, *differences))
    failure = failure or changed_file
    changed = None if fresh or failure else _count_changed(target, base)
    if fresh and trained:
        failure = failure or "the hyper-connections are not at the equivalent initialisation"
    if changed and not trained:
        failure = failure or f"{changed} tensors differ from the base's, though the hyper-connections are untrained"
    report = replace(report, changed=changed, failure=failure)
    if failure or mode == "structure":
        return report
    if is_resized:
        return replace(report, notes=(*report.notes, "logits not compared: they are of other tokens than the base's"))

    from .verification.numeric import compare_models, layers_that_fit

    total = max(each["num_hidden_layers"] for each in configs_of_stacks(target.config))
    run = min(layers or (total if mode == "full" else layers_that_fit(weights, total)), total)
    try:
        comparisons = compare_models(target, base, layers=run)
    except VerificationError as error:
        return replace(report, failure=str(error))
    if not trained:
        rounded = kind_of(target.config).is_rounded
        failure = next((c.failure() for c in comparisons if not (c.equal or (rounded and c.rounded))), None)
    return replace(report, comparisons=comparisons, layers=(run, total), failure=failure)


def _check_own(target: Checkpoint) -> tuple[str | None, bool | None]:
    """What is wrong with the checkpoint by itself, and whether its hyper-connections have been trained.

    Where something is wrong, the latter is not known.
    """
    from .verification.start import fault, measure_drift

    if found := code_fault(target):
        return found, None
    source, weights = target.source, target.weights
    listed = read_weight_map(source) if INDEX in source.files and len(weights.files) > 1 else weights.tensors
    if unlisted := weights.tensors.keys() - listed.keys():
        return f"{INDEX} does not list {min(unlisted)}", None
    if found := fault_of_sizes(target) or fault(target):
        return found, None
    from .checkpoint.loading import fault_by_headers  # with torch, which what comes before does without

    if unfit := fault_by_headers(target):
        return str(unfit), None
    with open_tensors(source, weights, "numpy") as read:
        has_changed, *_ = measure_drift(read, target)
    return None, has_changed


def _has_its_connections(target: Source, record: dict) -> bool:
    """Whether the shard of connections is the one that the conversion wrote; it may have recorded no digest of it."""
    name = record.get("hyper_connection_shard")
    return name in target.files and _digest(target, name) == record.get("hyper_connection_sha256")


def _damage(target: Source, record: dict | None) -> str | None:
    """What of the weights differs from the digests that the conversion recorded, if it did."""
    for shard in record["base_shards"] if record else ():
        name, expected = shard["file"], shard["sha256"]
        if name not in target.files or (expected is not None and _digest(target, name) != expected):
            return f"{name} is not what the conversion wrote"
    return None


def _digest(source: Source, name: str) -> str:
    """The SHA-256 of a file. Raises `UnsupportedCheckpointError` when it can't be read."""
    try:
        return digest(source.path(name))
    except OSError as error:
        raise UnsupportedCheckpointError(f"can't read {name} of {source.name!r}: {error.strerror}.") from error


def _renamed(target: Checkpoint, base: Checkpoint) -> frozenset[str]:
    """The names of tensors that the base has under others: saving gives them those of the installed Transformers.

    There are none where Transformers doesn't load the base in full.
    """
    from .checkpoint.loading import fault_by_headers

    names = {name for name in target.weights.tensors if not is_of_connection(name)} - base.weights.tensors.keys()
    if not names or fault_by_headers(base):
        return frozenset()
    return frozenset(names)


def _check_against(
    weights: Weights,
    base_weights: Weights,
    trained: bool | None,
    renamed: frozenset[str] | None,
    tokens: tuple[int, int] | None,
) -> str | None:
    """What is wrong with the tensors taken from the base, by their headers.

    Training may have changed dtypes, and saving may have left out tensors that the model does not know.

    renamed: as `_renamed` has them; None for a conversion that nobody has saved since.
    tokens: how many the checkpoint and the base have, where that may differ.
    """
    ours = {name: tensor for name, tensor in weights.tensors.items() if not is_of_connection(name)}
    for name in sorted((ours.keys() ^ base_weights.tensors.keys()) - (renamed or frozenset())):
        if name in ours or (renamed is None and not trained):
            return f"{name} is missing in {'the base' if name in ours else 'the checkpoint'}"
    for name, tensor in ours.items():
        if name not in base_weights.tensors:
            continue
        expected = base_weights.tensors[name]
        if tokens is not None and (tensor.shape, expected.shape) == tuple((n, *tensor.shape[1:]) for n in tokens):
            continue
        if tensor.shape != expected.shape or (tensor.dtype != expected.dtype and not trained):
            return (
                f"{name} is {tensor.dtype} {list(tensor.shape)}, in the base {expected.dtype} {list(expected.shape)}"
            )
    return None


def _count_changed(target: Checkpoint, base: Checkpoint) -> int:
    """How many tensors taken from the base differ from it in their bytes, by their names or else by any name."""
    import torch
    from huggingface_hub.utils import tqdm

    def form(tensor: TensorInfo) -> tuple:
        return tensor.dtype, tensor.shape

    weights, base_weights = target.weights, base.weights
    renamed = [name for name in weights.tensors.keys() - base_weights.tensors.keys() if not is_of_connection(name)]
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
    """The SHA-256 of a tensor's bytes."""
    import torch

    return hashlib.sha256(tensor.flatten().view(torch.uint8).numpy().data).digest()
