"""What the source of the installed Transformers says of a family: files are parsed, nothing is imported or run."""

import ast
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import UnsupportedCheckpointError
from .branches import Cut, cut_branches, digest, refusal
from .language_models import APART, find_language_model
from .loops import read_layer_loop
from .settings import fields_of_layer
from .source_files import Definition, SourceFile, package, release, source_file, table
from .stacks import find_stack

MAPPINGS = {
    "Model": "MODEL_MAPPING_NAMES",
    "ForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "ForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "ForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "ForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "ForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "ForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "ForAudioClassification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
    "ForImageTextToText": "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES",
    "ForMultimodalLM": "MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES",
    "ForSeq2SeqLM": "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES",
    "ForSpeechSeq2Seq": "MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES",
}
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")
BASE_OF_HEADS = "model"  # where language models with a head have their base model
NORMS_OF_TORCH = {"nn.RMSNorm": {"weight": 1.0}, "nn.LayerNorm": {"weight": 1.0, "bias": 0.0}}


@dataclass(frozen=True)
class FamilySource:
    """What there is to know of a family before its two files can be written.

    configuration, modeling: the modules of its classes, from `transformers.models`.
    config, pretrained, layer: names of its classes.
    renamed: what its config calls fields, by the names that most families give them.
    heads: the name of its class behind each Auto class, by suffix, the base model first.
    generative: which of them have `generate` from a base of their own.
    cut: the branches of the layer.
    cut_from: digest of the layer's `forward`.
    stack: where the base model has its layers, as `layers` or `encoder.layers`.
    positional: names of the arguments, besides the stream, that the base model gives a layer by their place.
    takes_index: whether a layer is made of the config and its index, or of the config alone.
    modules: names of the attributes that the base model's own `__init__` sets.
    predicting_norm: the attribute of the layer that dynamic coefficients take their norm from; None without any.
    norm: the initial value of each parameter of that norm.
    between: a method of the base model that its forward may call on the stream between layers; None without any.
    sizes: the defaults of its config for the number of layers, hidden size and vocabulary, by their usual names.
    language_model: for a model with a language model in it, that; what is said of layers is said of its.
    """

    model_type: str
    configuration: str
    modeling: str
    config: str
    pretrained: str
    layer: str
    renamed: dict[str, str]
    heads: dict[str, str]
    generative: frozenset[str]
    cut: Cut
    cut_from: str
    stack: str
    positional: tuple[str, ...]
    takes_index: bool
    modules: frozenset[str]
    predicting_norm: str | None
    norm: dict[str, float]
    between: str | None
    sizes: dict[str, int]
    language_model: "LanguageModel | None" = None


@dataclass(frozen=True)
class LanguageModel:
    """The part of a model that has the layers.

    attribute: of the base model.
    name: of its class.
    source: what there is to know of its family.
    """

    attribute: str
    name: str
    source: FamilySource


@cache
def read_family(model_type: str) -> FamilySource:
    """What Transformers' source says of a model type.

    model_type: may name the type of its language model, too, where a config chooses that: `llava__mistral`.

    Raises `UnsupportedCheckpointError` when Transformers doesn't have it, or its layers are not of the form that
    hyper-connections replace.
    """
    own_type, _, of_language = model_type.partition(APART)
    config = table("CONFIG_MAPPING_NAMES").get(own_type)
    if config is None:
        raise UnsupportedCheckpointError(f"Transformers {release()} has no model type {own_type!r:.60}.")
    configuration = _module("configuration", own_type)
    named = _class_names(own_type)
    modeling = _module("modeling", own_type) or _module("modeling", _first_with(named["Model"]))
    if named["Model"] is None and modeling is not None:
        named["Model"] = _within_another(source_file(_path(modeling)), config)
    if configuration is None or modeling is None or named["Model"] is None:
        raise UnsupportedCheckpointError(f"Transformers {release()} has no base model of {own_type!r} in a file.")
    file = source_file(_path(modeling))
    found = {suffix: definition for suffix, name in named.items() if name and (definition := file.find(name))}
    base, of_config = found.get("Model"), source_file(_path(configuration)).find(config)
    if base is None or of_config is None:
        raise UnsupportedCheckpointError(f"transformers.models.{modeling} defines no {named['Model']}.")
    pretrained = next((each.name for each in base.lineage() if "PreTrainedModel" in each.bases), None)
    if pretrained is None:
        raise UnsupportedCheckpointError(f"{base.name} is no PreTrainedModel that its source shows.")
    of_family: dict[str, Any] = {
        "model_type": model_type,
        "configuration": configuration,
        "modeling": modeling,
        "config": config,
        "pretrained": pretrained,
        "heads": {suffix: definition.name for suffix, definition in found.items()},
        "generative": frozenset(
            suffix for suffix, definition in found.items() if "GenerationMixin" in definition.bases
        ),
    }
    if (part := find_language_model(base, of_config, of_language)) is not None:
        try:
            inner = read_family(part.model_type)
        except UnsupportedCheckpointError as error:
            raise UnsupportedCheckpointError(
                f"{base.name} has a language model that can't be converted: {error}"
            ) from error
        name = part.name or inner.heads["Model"]
        if name not in inner.heads.values():
            raise UnsupportedCheckpointError(f"{base.name} has a {name} in it, no model of {inner.model_type!r}.")
        heads = {
            suffix: each.name
            for suffix, each in found.items()
            if each.name == base.name
            or (each.name not in inner.heads.values() and _made_by(each) & {base.name, "AutoModel"})
        }
        of_inner = "" if name == inner.heads["Model"] else f".{BASE_OF_HEADS}"
        return replace(
            inner,
            **{**of_family, "heads": heads},
            stack=f"{part.attribute}{of_inner}.{inner.stack}",
            language_model=LanguageModel(part.attribute, name, inner),
        )
    if of_language:
        raise UnsupportedCheckpointError(f"{base.name} takes no language model of a type that a config chooses.")
    renamed = of_config.renamed()
    stack = find_stack(base, ("num_hidden_layers", renamed.get("num_hidden_layers")))
    forward, of_forward = _method(stack.layer, "forward")
    loop = stack.owner.method("forward")
    if loop is None:
        raise UnsupportedCheckpointError(f"{base.name} has no forward that its source shows.")
    how = read_layer_loop(loop[0], stack.owner.name, stack.path.rpartition(".")[2])
    cut = cut_branches(forward, of_forward.text, stack.layer.name, fields_of_layer(stack.layer, of_config))
    if how.between and "." in stack.path:
        raise refusal(stack.layer.name, f"{stack.owner.name}.{how.between} changes the stream between layers")
    if how.takes_first != bool(cut.returned):
        raise refusal(stack.layer.name, "it returns other than its model takes")
    if cut.absent and "." in stack.path:
        raise refusal(stack.layer.name, f"what it adds of {', '.join(cut.absent)} would be left out")
    norm, values = _norm_of(stack.layer)
    defaults = of_config.constants()
    sizes = {usual: defaults.get(renamed.get(usual, usual)) for usual in SIZES}
    return FamilySource(
        **of_family,
        layer=stack.layer.name,
        renamed=renamed,
        cut=cut,
        cut_from=digest(ast.get_source_segment(of_forward.text, forward) or ""),
        stack=stack.path,
        positional=tuple(argument.arg for argument in forward.args.args[2 : 2 + how.positional]),
        takes_index=stack.takes_index,
        modules=_attributes(base),
        predicting_norm=norm,
        norm=values,
        between=how.between,
        sizes={usual: value for usual, value in sizes.items() if value is not None},
    )


def _class_names(model_type: str) -> dict[str, str | None]:
    """The class behind each Auto class, by suffix."""
    named = {suffix: table(variable).get(model_type) for suffix, variable in MAPPINGS.items()}
    if table(MAPPINGS["ForMultimodalLM"]):  # which has all of the other table, too
        named["ForMultimodalLM"] = named["ForMultimodalLM"] or named["ForImageTextToText"]
    return named


def _within_another(file: SourceFile, config: str) -> str | None:
    """The name of a language model's class that no Auto class has, as it is only a part of another model."""
    return next((name for name in file.made_of(config) if name.endswith("TextModel")), None)


def _module(kind: str, model_type: str | None) -> str | None:
    """The module of a model type's configs or models, from `transformers.models`; None when there is no such file."""
    if model_type is None:
        return None
    folder = table("SPECIAL_MODEL_TYPE_TO_MODULE_NAME").get(model_type, model_type.replace("-", "_"))
    module = f"{folder}.{kind}_{folder}"
    return module if _path(module).is_file() else None


def _path(module: str) -> Path:
    return (package() / "models").joinpath(*module.split(".")).with_suffix(".py")


def _first_with(model: str | None) -> str | None:
    """The model type that a base model is named after, where several have it."""
    of_model = [model_type for model_type, name in table(MAPPINGS["Model"]).items() if name == model]
    return next((each for each in of_model if _module("modeling", each)), None)


def _method(definition: Definition, name: str) -> tuple[ast.FunctionDef, SourceFile]:
    """A method that the class is known to have."""
    found = definition.method(name)
    assert found is not None
    return found


def _made_by(head: Definition) -> set[str]:
    """The classes that a head's `__init__` names: some have no more of a model than what it looks with."""
    made = head.method("__init__")
    return set() if made is None else {node.id for node in ast.walk(made[0]) if isinstance(node, ast.Name)}


def _attributes(base: Definition) -> frozenset[str]:
    """The names of `self.name = ...` in a class's `__init__`."""
    found = set()
    for node in ast.walk(_method(base, "__init__")[0]):
        match node:
            case ast.Assign(targets=[ast.Attribute(ast.Name("self"), name)]):
                found.add(name)
    return frozenset(found)


def _norm_of(layer: Definition) -> tuple[str | None, dict[str, float]]:
    """The attribute of the norm that predicts dynamic coefficients, and the start of its parameters.

    The norm before the MLP where there is one of the usual name, else the layer's first. It is None where there is
    none of which the source tells how its parameters start; an RMSNorm of torch then stands for it.
    """
    init, file = _method(layer, "__init__")
    norms: dict[str, ast.expr] = {}
    for node in ast.walk(init):
        match node:
            case ast.Assign(targets=[ast.Attribute(ast.Name("self"), name)], value=value) if (
                "norm" in name or name.startswith("ln_")
            ):
                norms.setdefault(name, value)
    for name in ("post_attention_layernorm", *norms):
        if isinstance(call := norms.get(name), ast.Call) and (values := _start_of(call, file)) is not None:
            return name, values
    return None, NORMS_OF_TORCH["nn.RMSNorm"]


def _start_of(call: ast.Call, file: SourceFile) -> dict[str, float] | None:
    """The start of a norm's parameters; None when the source doesn't tell."""
    written = ast.unparse(call.func)
    if written in NORMS_OF_TORCH:
        affine = {"elementwise_affine": "True", "bias": "True"}
        settings = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg != "eps"}
        return NORMS_OF_TORCH[written] if settings.items() <= affine.items() else None
    if (definition := file.find(written)) is None:
        return None
    found: dict[str, float | None] = {}
    for each in reversed([*definition.lineage()]):
        if _has_modules(each.node):
            return None
        found |= next((NORMS_OF_TORCH[base] for base in each.bases if base in NORMS_OF_TORCH), {})
        found |= _parameters(each.node)
    known = {name: value for name, value in found.items() if value is not None}
    return known if len(known) == len(found) else None


def _has_modules(definition: ast.ClassDef) -> bool:
    """Whether it is made of other modules: `self.name = Class(...)`."""
    assigned = (node for node in ast.walk(definition) if isinstance(node, ast.Assign))
    calls = [node.value.func for node in assigned if isinstance(node.value, ast.Call)]
    return any(
        ast.unparse(call).rpartition(".")[2][:1].isupper() and "Parameter" not in ast.unparse(call) for call in calls
    )


def _parameters(definition: ast.ClassDef) -> dict[str, float | None]:
    """The start of each `self.name = nn.Parameter(torch.ones(...))`; None for another expression."""
    found = {}
    for node in ast.walk(definition):
        match node:
            case ast.Assign(
                targets=[ast.Attribute(ast.Name("self"), name)], value=ast.Call(func=made, args=[value, *_])
            ) if ast.unparse(made) in ("nn.Parameter", "torch.nn.Parameter"):
                function = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
                found[name] = {"torch.ones": 1.0, "torch.zeros": 0.0}.get(function)
    return found
