"""What a model card reports of a checkpoint, from the files of its folder."""

import os
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.families.family import Family
from hf_hyperconn.kinds import FIELDS
from hf_hyperconn.models.connection_fields import completed
from hf_hyperconn.models.sub_layers import is_of_connection

from ..checkpoint.base_card import fetch_base_card, inheritable
from ..checkpoint.checkpoint import Checkpoint, open_conversion
from ..checkpoint.checkpoint_files import read_json
from ..checkpoint.fields import OPTIONS
from ..checkpoint.record import base_on_the_hub
from ..checkpoint.source import Source
from ..files.reading import finite
from ..inspection import Inspection, inspection_of
from .evaluation import Evaluation, model_index
from .licences import licence_of

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


if TYPE_CHECKING:
    from huggingface_hub import ModelCardData


def metadata_of(facts: Facts, evaluation: Evaluation | None) -> "ModelCardData":
    """The metadata of a model: what is known of it, what its base's card says, and scores of all samples."""
    from huggingface_hub import ModelCardData

    inherited, inspection = dict(facts.inherited), facts.inspection
    tags = ["hyper-connections", "hf-hyperconn", f"hc-x{inspection.hc_mult}", inspection.connection, "custom_code"]
    scores = [] if evaluation is None or evaluation.limited else model_index(evaluation)
    return ModelCardData(
        base_model=facts.base,
        base_model_relation="finetune" if facts.base else None,
        library_name="transformers",
        pipeline_tag=TASKS[facts.head],
        tags=[*tags, *inherited.pop("tags", [])],
        model_name=facts.name if scores else None,
        eval_results=scores or None,
        **inherited,
    )


def joined(theirs: "ModelCardData", ours: "ModelCardData", *, theirs_first: bool) -> "ModelCardData":
    """The metadata of a card that was there and of the new one, with the tags and scores of both.

    theirs_first: whether what stands in both stays as it was.
    """
    from huggingface_hub import ModelCardData

    second, first = (ours, theirs) if theirs_first else (theirs, ours)
    values = {**vars(second), **{name: value for name, value in vars(first).items() if value is not None}}
    scores = list(ours.eval_results or [])
    scores += [old for old in theirs.eval_results or [] if not any(map(old.is_equal_except_value, scores))]
    values |= {"tags": [*(ours.tags or []), *(theirs.tags or [])], "eval_results": scores or None}
    values["model_name"] = values["model_name"] if scores else None
    return ModelCardData(**values)


STATE = "trainer_state.json"


def training_facts(state: dict) -> list[tuple[str, str]]:
    """Names and values for people, of what a trainer_state.json holds: steps, epochs, tokens, losses, seconds."""
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
