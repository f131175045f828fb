"""Whether a hyper-connection checkpoint is what it should be, and computes what its base computes."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_hyperconn.analysis.costs import is_of_connection
from hf_hyperconn.errors import HyperConnError, UnsupportedCheckpointError
from hf_hyperconn.families import Family

from .checkpoint import INDEX, Weights, open_tensors, read_config, read_weight_map, read_weights
from .hyper_config import family_of
from .plan import CONNECTIONS
from .record import read_record
from .source import CONFIG, LocalSource, Source, open_source
from .transfer import compare

if TYPE_CHECKING:
    from .numeric import Comparison

MODES = ("auto", "full", "structure")


@dataclass(frozen=True)
class VerificationReport:
    """What a verification found.

    tensors: how many tensors the checkpoint holds.
    trained: whether its hyper-connections have left the equivalent initialisation.
    changed: base tensors that differ from the base's; None when there was no base to compare with.
    comparisons: one for each dtype in which both models ran; empty without a numeric verification.
    layers: (run, all) decoder layers of the numeric verification.
    failure: what is wrong, or None.
    """

    tensors: int
    trained: bool
    changed: int | None
    comparisons: "tuple[Comparison, ...]" = ()
    layers: tuple[int, int] | None = None
    failure: str | None = None

    @property
    def passed(self) -> bool:
        """A trained checkpoint passes whatever its distance from its base."""
        return self.failure is None

    def lines(self) -> list[str]:
        """The report for people."""
        state = "trained" if self.trained else "at the equivalent initialisation"
        lines = [f"structure     {self.tensors} tensors; the hyper-connections are {state}"]
        if self.changed is not None:
            same = "the same bytes as the base's" if self.changed == 0 else f"{self.changed} differ from the base's"
            lines.append(f"base tensors  {same}")
        if self.layers:
            run, total = self.layers
            lines.append(
                f"layers        {'all' if run == total else 'the first'} {run}{f' of {total}' * (run < total)}"
            )
        return [*lines, *(comparison.line() for comparison in self.comparisons)]

    def as_dict(self) -> dict:
        """The report for machines."""
        return {**asdict(self), "passed": self.passed}


def verify_checkpoint(
    folder: str | Path,
    against: str | Source | None = None,
    *,
    revision: str | None = None,
    mode: str = "auto",
    layers: int | None = None,
    fresh: bool = False,
) -> VerificationReport:
    """Check a hyper-connection checkpoint, and compare it with its base.

    folder: of the hyper-connection checkpoint.
    against: its Pre-Norm base, a folder or a Hub id; without it only the folder itself is checked.
    revision: of `against`, when it is a Hub repo.
    mode: "structure" checks tensors and files; "full" also runs both models, one after the other, in the checkpoint's
        dtype and in float32; "auto" does so with as many of the first layers as fit in free memory.
    layers: run only this many of the first layers.
    fresh: the folder was just made from `against` by the converter, which compares the shards itself, so it must be at
        the equivalent initialisation.

    Raises `UnsupportedCheckpointError` when either can't be read or `folder` is no hyper-connection checkpoint, and
    `HyperConnError` for an unknown mode.
    """
    if mode not in MODES:
        raise HyperConnError(f"mode {mode!r} was asked for; accepted are {', '.join(map(repr, MODES))}.")
    target = LocalSource(Path(folder))
    config = read_config(target)
    family = family_of(target, config)
    if config["connection"] not in CONNECTIONS or config.get("norm") is not None:
        raise UnsupportedCheckpointError(
            f"'{folder}' was trained from scratch: no base computes what connection {config.get('connection')!r} and "
            f"norm {config.get('norm')!r} do, so there is nothing to verify."
        )
    weights = read_weights(target)
    failure, trained = _check_own(target, config, family, weights)
    base = open_source(against, revision) if isinstance(against, str) else against
    if failure or base is None:
        failure = failure or (None if trained else _damage(target))
        return VerificationReport(len(weights.tensors), trained, None, failure=failure)

    base_weights = read_weights(base)
    failure = _check_against(weights, base_weights, trained)
    changed = None if fresh or failure else _count_changed(target, weights, base, base_weights)
    if fresh and trained:
        failure = failure or "the hyper-connections are not at the equivalent initialisation"
    if changed and not trained:
        failure = failure or f"{changed} tensors differ from the base's, though the hyper-connections are untrained"
    if failure or mode == "structure":
        return VerificationReport(len(weights.tensors), trained, changed, failure=failure)

    from .numeric import compare_models, layers_that_fit

    total = config["num_hidden_layers"]
    run = min(layers or (total if mode == "full" else layers_that_fit(weights, total)), total)
    comparisons = compare_models((target, weights), (base, base_weights), family, config, layers=run)
    if not trained:
        rounded = config["connection"] in ("mhc", "ihc")
        failure = next((c.failure() for c in comparisons if not (c.equal or (rounded and c.rounded))), None)
    return VerificationReport(len(weights.tensors), trained, changed, comparisons, (run, total), failure)


def _check_own(target: Source, config: dict, family: Family, weights: Weights) -> tuple[str | None, bool]:
    """What is wrong with the checkpoint by itself, and whether its hyper-connections have been trained."""
    from .drift import fault, measure_drift

    if config.get("auto_map") != family.auto_map:
        return f"{CONFIG} does not name the classes of {family.hc_model_type} in auto_map", False
    if absent := [name for name in family.code if name not in target.files]:
        return f"the code file {absent[0]} is missing", False
    listed = read_weight_map(target) if INDEX in target.files and len(weights.files) > 1 else weights.tensors
    if unlisted := weights.tensors.keys() - listed.keys():
        return f"{INDEX} does not list {min(unlisted)}", False
    if found := fault(weights, config, family):
        return found, False
    with open_tensors(target, weights, "numpy") as read:
        has_changed, _ = measure_drift(read, config, family, weights.prefix or "")
    return None, has_changed


def _damage(target: Source) -> str | None:
    """What differs from the digests that the conversion recorded, if it did."""
    record = read_record(target)
    for shard in record["base_shards"] if record else ():
        path = target.path(shard["file"])
        if shard["file"] not in target.files or shard["sha256"] not in (None, compare(path, path)):
            return f"{shard['file']} is not what the conversion wrote"
    return None


def _check_against(weights: Weights, base_weights: Weights, trained: bool) -> str | None:
    """What is wrong with the tensors taken from the base, by their headers.

    Training may have changed dtypes, and saving may have left out tensors that the model does not know.
    """
    ours = {name: tensor for name, tensor in weights.tensors.items() if not is_of_connection(name)}
    for name in sorted(set(ours) ^ set(base_weights.tensors)):
        if name in ours or not trained:
            return f"{name} is missing in {'the base' if name in ours else 'the checkpoint'}"
    for name, tensor in ours.items():
        expected = base_weights.tensors[name]
        if tensor.shape != expected.shape or (tensor.dtype != expected.dtype and not trained):
            return (
                f"{name} is {tensor.dtype} {list(tensor.shape)}, in the base {expected.dtype} {list(expected.shape)}"
            )
    return None


def _count_changed(target: Source, weights: Weights, base: Source, base_weights: Weights) -> int:
    """How many tensors taken from the base differ from it in their bytes."""
    import torch
    from huggingface_hub.utils import tqdm

    changed = 0
    with (
        tqdm(total=base_weights.nbytes, unit="B", unit_scale=True, desc="Comparing tensors", disable=None) as bar,
        open_tensors(base, base_weights, "torch") as theirs,
        open_tensors(target, weights, "torch") as ours,
    ):
        for name, tensor in base_weights.tensors.items():
            if name in weights.tensors:
                a, b = theirs(name).flatten(), ours(name).flatten()
                changed += not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            bar.update(tensor.nbytes)
    return changed
