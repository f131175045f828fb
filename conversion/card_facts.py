"""What a model card reports of a checkpoint, from the files of its folder."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.families import Family
from hf_hyperconn.kinds import FIELDS
from hf_hyperconn.models.connection_fields import completed
from hf_hyperconn.models.sub_layers import is_of_connection

from .base_card import fetch_base_card, inheritable
from .checkpoint import Checkpoint, open_conversion
from .checkpoint_files import read_json
from .fields import OPTIONS
from .inspection import Inspection, inspection_of
from .licences import licence_of
from .record import base_on_the_hub
from .source import Source
from .trainer_state import STATE, training_facts

PICTURES = (".png", ".svg", ".jpg", ".jpeg", ".webp")
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

# task on the Hub by the suffix of the Auto class that finds a model's class
TASKS = {
    "ForCausalLM": "text-generation",
    "ForImageTextToText": "image-text-to-text",
    "ForMultimodalLM": "any-to-any",
    "ForSeq2SeqLM": "any-to-any",
    "ForSpeechSeq2Seq": "automatic-speech-recognition",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
    "ForMaskedLM": "fill-mask",
    "ForImageClassification": "image-classification",
    "ForZeroShotImageClassification": "zero-shot-image-classification",
    "ForSemanticSegmentation": "image-segmentation",
    "ForDepthEstimation": "depth-estimation",
    "ForMaskedImageModeling": "image-feature-extraction",
    "ForVideoClassification": "video-classification",
    "ForAudioClassification": "audio-classification",
    "Backbone": "image-feature-extraction",
    "ForPreTraining": "image-feature-extraction",
    "Model": "feature-extraction",
}


@dataclass(frozen=True)
class Facts:
    """What is known of a checkpoint with hyper-connections.

    files: paths in its folder.
    record: what the conversion wrote down; empty for a model that was saved after training.
    base, commit: of a base on the Hub; None for another.
    inherited: of the metadata of the base's card.
    as_converted: whether the weights lie in files as the converter leaves them, which saving a model never does.
    training: names and values, where Trainer left its state.
    """

    name: str
    files: tuple[str, ...]
    config: dict
    record: dict
    inspection: Inspection
    family: Family
    base: str | None
    commit: str | None
    inherited: dict
    as_converted: bool
    training: list[tuple[str, str]]

    @property
    def state(self) -> str | None:
        """Whether it is "equal" to its base, or has connections that are "initial" or "trained"; None if not known."""
        if self.inspection.trained is False:
            return "equal" if self.as_converted else "initial"
        return "trained" if self.inspection.trained else None

    @property
    def head(self) -> str:
        """The head of the model's class, a key of `TASKS`."""
        (architecture, *_) = self.config.get("architectures") or [self.family.usual_architecture]
        return self.family.head_of(architecture)

    @property
    def base_name(self) -> str | None:
        """What to call the base: its Hub id, or the name of its folder."""
        return self.base or self.inspection.base

    @property
    def licence(self) -> str | None:
        """The name of the base's licence."""
        return licence_of(self.inherited)

    @property
    def licence_files(self) -> list[str]:
        """Files with a licence or its policy, beside the weights."""
        return sorted(
            n for n in self.files if "/" not in n and n.lower().startswith(("licen", "copying", "use_policy"))
        )

    @property
    def has_tokenizer(self) -> bool:
        """Whether there is a tokenizer beside the weights."""
        return not set(TOKENIZERS).isdisjoint(self.files)

    @property
    def figures(self) -> list[tuple[str, str]]:
        """Title and path of every picture in `figures`."""
        paths = [Path(name) for name in sorted(self.files) if name.startswith("figures/")]
        return [(path.stem, path.as_posix()) for path in paths if path.suffix in PICTURES and len(path.parts) == 2]

    @property
    def command(self) -> str | None:
        """The command that makes this conversion."""
        if not (made := self.record.get("arguments")):
            return None
        words = ["hf-hyperconn", "convert", self.base_name, self.name, "-n", made["hc_mult"]]
        usual = {**FIELDS, "hc_readout": completed({"hc_start": made.get("hc_start")})["hc_readout"]}
        for name, option in OPTIONS.items():  # records of earlier releases lack the newer ones
            if name != "hc_mult" and (value := made.get(name, usual[name])) != usual[name]:
                words += ["--no-tanh"] if name == "hc_tanh" else [option, value]
        if (stack := self.inspection.stack) is not None:
            words += ["--stack", stack]
        words += ["--revision", self.commit] * (self.commit is not None)
        return shlex.join(map(str, words))

    @property
    def verification(self) -> list[tuple[str, str]]:
        """What the verification of the conversion looked at, and what it found."""
        report = self.record.get("verification")
        if not report:
            return []
        rows = [
            ("tensors", f"{report['tensors']}, all with their shapes; connections at the equivalent initialisation")
        ]
        if report["comparisons"]:
            rows.append(("files of the base", "byte for byte the same"))
            rows.append(("layers run", "{} of {}".format(*report["layers"])))
        return rows + [(compared["dtype"], _found(compared)) for compared in report["comparisons"]]


def collect_facts(folder: Path, name: str | None = None) -> tuple[Facts, list[str]]:
    """What is known of the checkpoint in a folder, and warnings of what could not be found out.

    name: of the model; by default that of the folder.

    Raises `UnsupportedCheckpointError` when there is no checkpoint with hyper-connections.
    """
    checkpoint = open_conversion(folder)
    inspection = inspection_of(checkpoint)
    source, config = checkpoint.source, checkpoint.config
    base, commit = base_on_the_hub(config, checkpoint.record)
    record, warnings = checkpoint.record or {}, []
    inherited = None if record.get("base_card") is None else inheritable(record["base_card"])
    if inherited is None and base is not None:
        try:
            inherited = fetch_base_card(base, commit)
        except UnsupportedCheckpointError as error:
            warnings.append(f"the card of the base, which names its licence, can't be read: {error}")
    facts = Facts(
        name=name or Path(os.path.realpath(folder)).name,
        files=tuple(source.files),
        config=config,
        record=record,
        inspection=inspection,
        family=checkpoint.family,
        base=base,
        commit=commit,
        inherited=_with_link(inherited or {}, base, commit, source),
        as_converted=_is_as_converted(checkpoint),
        training=training_facts(read_json(source, STATE)) if STATE in source.files else [],
    )
    return facts, warnings


def _is_as_converted(checkpoint: Checkpoint) -> bool:
    """Whether connections have the conversion's file to themselves, and the others the sizes that it recorded."""
    record, source, weights = checkpoint.record or {}, checkpoint.source, checkpoint.weights
    shard, shards = record.get("hyper_connection_shard"), record.get("base_shards", [])
    sizes = all(source.files.get(each["file"]) == each["size"] for each in shards)
    return (
        bool(shards)
        and sizes
        and all((tensor.file == shard) == is_of_connection(name) for name, tensor in weights.tensors.items())
    )


def _with_link(metadata: dict, base: str | None, commit: str | None, source: Source) -> dict:
    """The metadata, its link to a licence file of the base leading there when that file is not here."""
    link = metadata.get("license_link")
    if base is None or not isinstance(link, str) or "://" in link or link in source.files:
        return metadata
    return {**metadata, "license_link": f"https://huggingface.co/{base}/blob/{commit or 'main'}/{link}"}


def _found(compared: dict) -> str:
    if compared["logits"] and compared["hidden_states"] and compared["continuation"] is not False:
        same = "logits, hidden states and greedy continuation" if compared["continuation"] else "outputs"
        return f"{same} equal to the base's, bit for bit"
    return (
        f"largest difference of logits {compared['max_difference']:.3g}, KL divergence {compared['kl']:.3g}, "
        f"top-1 agreement {100 * compared['top1']:.1f} %"
    )
