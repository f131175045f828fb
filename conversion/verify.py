"""Whether a hyper-connection checkpoint is what it should be, and computes what its base computes."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.families import FAMILIES, Family

from .checkpoint import CONFIG, INDEX, Weights, read_config, read_weights
from .source import LocalSource, Source, open_source

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
    fresh: the folder was just made from `against`: its shards were compared when they were brought, and it must still
        be at the equivalent initialisation.

    Raises `UnsupportedCheckpointError` when either can't be read or `folder` is no hyper-connection checkpoint.
    """
    target = LocalSource(Path(folder))
    config = read_config(target)
    family = next((f for f in FAMILIES.values() if f.hc_model_type == config.get("model_type")), None)
    if family is None:
        raise UnsupportedCheckpointError(
            f"'{folder}' has model_type {config.get('model_type')!r}; give a converted checkpoint "
            f"({', '.join(f.hc_model_type for f in FAMILIES.values())})."
        )
    weights = read_weights(target)
    failure, trained = _check_own(target, config, family, weights)
    base = open_source(against, revision) if isinstance(against, str) else against
    if failure or base is None:
        return VerificationReport(len(weights.tensors), trained, None, failure=failure)
    failure, changed = _check_base_tensors(target, weights, base, compare=not fresh)
    if fresh and trained:
        failure = failure or "the hyper-connections are not at the equivalent initialisation"
    if changed and not trained:
        failure = failure or f"{changed} tensors differ from the base's, though the hyper-connections are untrained"
    if failure or mode == "structure":
        return VerificationReport(len(weights.tensors), trained, changed, failure=failure)

    from .numeric import compare_models, layers_that_fit

    total = config["num_hidden_layers"]
    run = min(layers or (total if mode == "full" else layers_that_fit(weights, total)), total)
    comparisons = compare_models(target, base, family, config, weights, layers=run)
    if not trained:
        failure = next((c.failure() for c in comparisons if not c.equal), None)
    return VerificationReport(len(weights.tensors), trained, changed, comparisons, (run, total), failure)


def _check_own(target: Source, config: dict, family: Family, weights: Weights) -> tuple[str | None, bool]:
    """What is wrong with the checkpoint by itself, and whether its hyper-connections have been trained."""
    import torch
    from safetensors import safe_open

    from .equivalent import hyper_connection_tensors

    if config.get("auto_map") != family.auto_map:
        return f"{CONFIG} does not name the classes of {family.hc_model_type} in auto_map", False
    absent = [name for name in family.code if name not in target.files]
    if absent:
        return f"the code file {absent[0]} is missing", False
    if INDEX in target.files and len(weights.files) > 1:
        weight_map = json.loads(target.path(INDEX).read_text(encoding="utf-8"))["weight_map"]
        if unlisted := set(weights.tensors) - set(weight_map):
            return f"{INDEX} does not list {min(unlisted)}", False
    prefix = next((name.partition("layers.0.")[0] for name in weights.tensors if "layers.0." in name), "")
    trained = False
    for name, value in hyper_connection_tensors(config, family, prefix).items():
        stored = weights.tensors.get(name)
        if stored is None:
            return f"the tensor {name} is missing", False
        if (stored.dtype, stored.shape) != ("F32", tuple(value.shape)):
            return f"{name} is {stored.dtype} {list(stored.shape)}, not F32 {list(value.shape)}", False
        with safe_open(target.path(stored.file), framework="pt") as file:
            trained = trained or not torch.equal(file.get_tensor(name), value)
    return None, trained


def _check_base_tensors(target: Source, weights: Weights, base: Source, *, compare: bool) -> tuple[str | None, int]:
    """What is wrong with the tensors taken from the base, and how many differ from it in their bytes."""
    base_weights = read_weights(base)
    ours = {
        name: tensor for name, tensor in weights.tensors.items() if "attn_hc." not in name and "mlp_hc." not in name
    }
    for name in sorted(set(ours) ^ set(base_weights.tensors)):
        where = "the base" if name in ours else "the checkpoint"
        return f"{name} is missing in {where}", 0
    for name, tensor in base_weights.tensors.items():
        if (tensor.dtype, tensor.shape) != (ours[name].dtype, ours[name].shape):
            return (
                f"{name} is {ours[name].dtype} {list(ours[name].shape)}, in the base "
                f"{tensor.dtype} {list(tensor.shape)}"
            ), 0
    return None, _count_changed(target, weights, base, base_weights) if compare else 0


def _count_changed(target: Source, weights: Weights, base: Source, base_weights: Weights) -> int:
    import torch
    from huggingface_hub.utils import tqdm
    from safetensors import safe_open

    changed = 0
    with tqdm(total=base_weights.nbytes, unit="B", unit_scale=True, desc="Comparing tensors", disable=None) as bar:
        for name, tensor in base_weights.tensors.items():
            with (
                safe_open(base.path(tensor.file), framework="pt") as theirs,
                safe_open(target.path(weights.tensors[name].file), framework="pt") as ours,
            ):
                a, b = theirs.get_tensor(name).flatten(), ours.get_tensor(name).flatten()
                changed += not torch.equal(a.view(torch.uint8), b.view(torch.uint8))
            bar.update(tensor.nbytes)
    return changed
