"""The name of a family, its classes, and their files in Transformers."""

import ast
from dataclasses import dataclass
from pathlib import Path

from .source_files import Definition, SourceFile, package, table

SEPARATOR = "__"  # between the names in the name of a family
# the table of Transformers behind each Auto class, by suffix
MAPPINGS = {
    "Model": "MODEL_MAPPING_NAMES",
    "ForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "ForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "ForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "ForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "ForMultipleChoice": "MODEL_FOR_MULTIPLE_CHOICE_MAPPING_NAMES",
    "ForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "ForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "ForZeroShotImageClassification": "MODEL_FOR_ZERO_SHOT_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "ForSemanticSegmentation": "MODEL_FOR_SEMANTIC_SEGMENTATION_MAPPING_NAMES",
    "ForDepthEstimation": "MODEL_FOR_DEPTH_ESTIMATION_MAPPING_NAMES",
    "ForMaskedImageModeling": "MODEL_FOR_MASKED_IMAGE_MODELING_MAPPING_NAMES",
    "ForVideoClassification": "MODEL_FOR_VIDEO_CLASSIFICATION_MAPPING_NAMES",
    "ForAudioClassification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "ForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "ForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "ForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "ForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
    "Backbone": "MODEL_FOR_BACKBONE_MAPPING_NAMES",
    "ForPreTraining": "MODEL_FOR_PRETRAINING_MAPPING_NAMES",  # for most the class of another head
}


@dataclass(frozen=True)
class FamilyName:
    """The name of a family, such as `llava`, `llava__mistral` or `llava__siglip_vision_model__vision_tower`.

    own: the model type.
    chosen: model type of the inner model with the layers, where a config chooses an unusual one.
    stack: attribute of an unusual inner model: the vision tower of a model with a language model, or the encoder
        alone of an encoder-decoder.
    """

    own: str
    chosen: str | None = None
    stack: str | None = None

    @classmethod
    def of(cls, name: str) -> "FamilyName":
        """Take a name apart."""
        own, *rest = name.split(SEPARATOR)
        chosen = rest.pop(0) if rest and rest[0] in table("CONFIG_MAPPING_NAMES") else None
        return cls(own, chosen, SEPARATOR.join(rest) or None)

    def __str__(self) -> str:
        return SEPARATOR.join(name for name in (self.own, self.chosen, self.stack) if name is not None)


def auto_class(suffix: str) -> str:
    """Return the name of the Auto class with this suffix."""
    return "AutoBackbone" if suffix == "Backbone" else "AutoModel" + suffix.removeprefix("Model")


def class_names(model_type: str) -> dict[str, str | None]:
    """Return the class behind each Auto class, by suffix."""
    named = {suffix: table(variable).get(model_type) for suffix, variable in MAPPINGS.items()}
    if table(MAPPINGS["ForMultimodalLM"]):  # which has all of the other table, too
        named["ForMultimodalLM"] = named["ForMultimodalLM"] or named["ForImageTextToText"]
    pretrained = named.pop("ForPreTraining")
    return named if pretrained in named.values() else {**named, "ForPreTraining": pretrained}


def within_another(file: SourceFile, config: str) -> str | None:
    """Return the class of a model without an Auto class, such as a tower of another model.

    Of several classes with this config it is the text model; None if not known.
    """
    classes = [definition for name in file.classes_with(config) if (definition := file.find(name)) is not None]
    models = [definition.name for definition in classes if definition.pretrained]
    of_text = [name for name in models if name.endswith("TextModel")]
    return next(iter(of_text or (models if len(models) == 1 else [])), None)


def module_of(kind: str, model_type: str | None) -> str | None:
    """Return the module of a model type's configs or models, from `transformers.models`; None without such a file."""
    if model_type is None:
        return None
    folder = table("SPECIAL_MODEL_TYPE_TO_MODULE_NAME").get(model_type, model_type.replace("-", "_"))
    module = f"{folder}.{kind}_{folder}"
    return module if path_of(module).is_file() else None


def path_of(module: str) -> Path:
    return (package() / "models").joinpath(*module.split(".")).with_suffix(".py")


def first_with(model: str | None) -> str | None:
    """Return the first model type of a base model that has a file of its own."""
    of_model = [model_type for model_type, name in table(MAPPINGS["Model"]).items() if name == model]
    return next((model_type for model_type in of_model if module_of("modeling", model_type)), None)


def named_by_init(head: Definition) -> set[str]:
    """Return the names in a head's `__init__`, its own or inherited."""
    nodes = [node for definition in head.lineage() for node in definition.node.body]
    inits = [node for node in nodes if getattr(node, "name", None) == "__init__"]
    return {node.id for init in inits for node in ast.walk(init) if isinstance(node, ast.Name)}
