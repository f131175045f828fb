"""The facts that a model card reports, from the files of a checkpoint's folder."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.kinds import FIELDS
from hf_hyperconn.models.connection_fields import complete
from hf_hyperconn.models.sub_layers import is_of_connection

from ..checkpoint.checkpoint import Checkpoint, open_conversion
from ..checkpoint.checkpoint_files import read_json_object
from ..checkpoint.connection_options import OPTIONS
from ..checkpoint.readme import fetch_base_card, inheritable
from ..checkpoint.record import base_on_the_hub
from ..checkpoint.source import Source
from ..files.reading import finite
from ..inspection import Inspection, inspection_of
from .licenses import license_of

PICTURE_SUFFIXES = (".png", ".svg", ".jpg", ".jpeg", ".webp")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
LICENSE_FILES = ("licen", "copying", "use_policy")  # beginnings of their names
TRAINER_STATE = "trainer_state.json"


@dataclass(frozen=True)
class Facts:
    """The facts of a conversion, or of a model trained from it.

    name: of the model.
    base, commit: Hub id and commit of the base; None for a local base.
    inherited: metadata from the card of the base.
    training: names and values from the state of a Trainer.
    """

    name: str
    checkpoint: Checkpoint
    inspection: Inspection
    base: str | None
    commit: str | None
    inherited: dict
    training: list[tuple[str, str]]

    @property
    def files(self) -> tuple[str, ...]:
        """Return the paths of the folder's files."""
        return tuple(self.checkpoint.source.files)

    @property
    def record(self) -> dict:
        """Return the record of the conversion; empty for a model that was saved after training."""
        return self.checkpoint.record or {}

    @property
    def state(self) -> str | None:
        """Return "equal" for a model equal to its base, else "initial" or "trained"; None if not known."""
        if self.inspection.trained is False:
            return "equal" if _is_as_converted(self.checkpoint) else "initial"
        return "trained" if self.inspection.trained else None

    @property
    def head(self) -> str:
        """Return the head of the model's class, a key of `TASKS`."""
        return self.checkpoint.family.head_of(self.checkpoint.architectures[0])

    @property
    def base_name(self) -> str | None:
        """Return the Hub id of the base, or the name of its folder."""
        return self.base or self.inspection.base

    @property
    def license(self) -> str | None:
        """Return the name of the base's license."""
        return license_of(self.inherited)

    @property
    def license_files(self) -> list[str]:
        """Return files with a license or its policy, beside the weights."""
        return sorted(name for name in self.files if "/" not in name and name.lower().startswith(LICENSE_FILES))

    @property
    def has_tokenizer(self) -> bool:
        """Tell whether there is a tokenizer beside the weights."""
        return not set(TOKENIZERS).isdisjoint(self.files)

    @property
    def figures(self) -> list[tuple[str, str]]:
        """Return title and path of every picture in `figures`."""
        paths = [Path(name) for name in sorted(self.files) if name.startswith("figures/")]
        return [
            (path.stem, path.as_posix()) for path in paths if path.suffix in PICTURE_SUFFIXES and len(path.parts) == 2
        ]

    @property
    def command(self) -> str | None:
        """Return the command that makes this conversion."""
        if not (arguments := self.record.get("arguments")):
            return None
        words = ["hf-hyperconn", "convert", self.base_name, self.name, "-n", arguments["hc_mult"]]
        usual = {**FIELDS, "hc_readout": complete({"hc_start": arguments.get("hc_start")})["hc_readout"]}
        for name, option in OPTIONS.items():  # records of earlier releases lack the newer ones
            if name != "hc_mult" and (value := arguments.get(name, usual[name])) != usual[name]:
                words += ["--no-tanh"] if name == "hc_tanh" else [option, value]
        if (stack := self.inspection.stack) is not None:
            words += ["--stack", stack]
        words += ["--revision", self.commit] * (self.commit is not None)
        return shlex.join(map(str, words))

    @property
    def verification(self) -> list[tuple[str, str]]:
        """Return subject and result of each check of the conversion."""
        report = self.record.get("verification")
        if not report:
            return []
        tensors = f"{report['tensors']}, all with their shapes; connections at the equivalent initialization"
        rows = [("tensors", tensors)]
        if report["comparisons"]:
            rows.append(("files of the base", "byte for byte the same"))
            rows.append(("layers run", "{} of {}".format(*report["layers"])))
        return rows + [(comparison["dtype"], _result(comparison)) for comparison in report["comparisons"]]


def collect_facts(folder: Path, name: str | None = None) -> tuple[Facts, list[str]]:
    """Collect the facts of the checkpoint in a folder, and warnings of unreadable ones.

    name: of the model; by default the folder's.

    Raises `UnsupportedCheckpointError` when there is no checkpoint with hyper-connections.
    """
    checkpoint = open_conversion(folder)
    inspection = inspection_of(checkpoint)
    base, commit = base_on_the_hub(checkpoint.config, checkpoint.record)
    base_card, warnings = (checkpoint.record or {}).get("base_card"), []
    inherited = {} if base_card is None else inheritable(base_card)
    if base_card is None and base is not None:
        try:
            inherited = fetch_base_card(base, commit)
        except UnsupportedCheckpointError as error:
            warnings.append(f"the card of the base, which names its license, can't be read: {error}")
    source = checkpoint.source
    facts = Facts(
        name=name or Path(os.path.realpath(folder)).name,
        checkpoint=checkpoint,
        inspection=inspection,
        base=base,
        commit=commit,
        inherited=_with_link(inherited, base, commit, source),
        training=training_facts(read_json_object(source, TRAINER_STATE)) if TRAINER_STATE in source.files else [],
    )
    return facts, warnings


def training_facts(state: dict) -> list[tuple[str, str]]:
    """Return names and values for people from a Trainer's state: steps, epochs, tokens, losses, seconds."""
    facts = []
    step, steps, epochs = (finite(state.get(name)) for name in ("global_step", "max_steps", "epoch"))
    if step is not None:
        facts.append(("steps", f"{step:,}" if not steps or steps == step else f"{step:,} of {steps:,}"))
    if epochs is not None:
        facts.append(("epochs", f"{epochs:.4g}"))
    if tokens := finite(state.get("num_input_tokens_seen")):
        facts.append(("tokens", f"{tokens:,}"))
    history = state.get("log_history")
    entries = [entry for entry in history if isinstance(entry, dict)] if isinstance(history, list) else []
    for key, name in (("loss", "loss"), ("eval_loss", "held-out loss")):
        logged = [entry for entry in entries if finite(entry.get(key)) is not None]
        if logged:
            shown = [f"{entry[key]:.4f} at step {finite(entry.get('step'))}" for entry in (logged[0], logged[-1])]
            facts.append((name, shown[0] if len(logged) == 1 else ", then ".join(shown)))
    runtime = next((entry["train_runtime"] for entry in entries if finite(entry.get("train_runtime"))), None)
    if runtime is not None:
        facts.append(("time", f"{runtime:,.0f} s"))
    return facts


def _is_as_converted(checkpoint: Checkpoint) -> bool:
    """Tell whether the weight files are as the converter leaves them; a saved model's never are.

    Connections then have a file of their own, and the other files have their recorded sizes.
    """
    record, sizes = checkpoint.record or {}, checkpoint.source.files
    shards, hc_shard = record.get("base_shards", []), record.get("hyper_connection_shard")
    return (
        bool(shards)
        and all(sizes.get(shard["file"]) == shard["size"] for shard in shards)
        and all((info.file == hc_shard) == is_of_connection(name) for name, info in checkpoint.weights.tensors.items())
    )


def _with_link(metadata: dict, base: str | None, commit: str | None, source: Source) -> dict:
    """Return the metadata with a link to the base's license file where the folder lacks that file."""
    link = metadata.get("license_link")
    if base is None or not isinstance(link, str) or "://" in link or link in source.files:
        return metadata
    return {**metadata, "license_link": f"https://huggingface.co/{base}/blob/{commit or 'main'}/{link}"}


def _result(comparison: dict) -> str:
    if comparison["logits"] and comparison["hidden_states"] and comparison["continuation"] is not False:
        same = "logits, hidden states and greedy continuation" if comparison["continuation"] else "outputs"
        return f"{same} equal to the base's, bit for bit"
    return (
        f"largest difference of logits {comparison['max_difference']:.3g}, KL divergence {comparison['kl']:.3g}, "
        f"top-1 agreement {100 * comparison['top1']:.1f} %"
    )
