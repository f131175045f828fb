"""What the source of the installed Transformers says of a family: files are parsed, nothing is imported or run."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.machinery import PathFinder
from pathlib import Path

from ..errors import UnsupportedCheckpointError
from .branches import Cut, check_layer_loop, cut_branches, digest

MAPPINGS = {
    "Model": "MODEL_MAPPING_NAMES",
    "ForCausalLM": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
    "ForSequenceClassification": "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    "ForTokenClassification": "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES",
    "ForQuestionAnswering": "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES",
    "ForMaskedLM": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
    "ForImageClassification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    "ForAudioClassification": "MODEL_FOR_AUDIO_CLASSIFICATION_MAPPING_NAMES",
}
NORMS_OF_TORCH = {"nn.RMSNorm": {"weight": 1.0}, "nn.LayerNorm": {"weight": 1.0, "bias": 0.0}}


@cache
def package() -> Path:
    """The folder of the installed Transformers.

    Raises `UnsupportedCheckpointError` when there is none.
    """
    spec = PathFinder.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise UnsupportedCheckpointError("Transformers is not installed: pip install transformers")
    return Path(spec.origin).parent


@cache
def release() -> str:
    """The version of the installed Transformers."""
    return re.search(r'^__version__ = "([^"]+)"', (package() / "__init__.py").read_text("utf-8"), re.MULTILINE)[1]


@dataclass(frozen=True)
class Definition:
    """A class as it stands in a file of Transformers."""

    node: ast.ClassDef
    file: "SourceFile"

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def bases(self) -> list[str]:
        """The names of its bases, as they are written."""
        return [ast.unparse(base) for base in self.node.bases]

    def lineage(self) -> Iterator["Definition"]:
        """The class and the classes of Transformers that it is made of, nearest first."""
        yield self
        for base in self.bases:
            if (found := self.file.find(base)) is not None:
                yield from found.lineage()

    def method(self, name: str) -> tuple[ast.FunctionDef, "SourceFile"] | None:
        """A method, its own or inherited, and the file it stands in."""
        for definition in self.lineage():
            for node in definition.node.body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return node, definition.file
        return None


class SourceFile:
    """A module of Transformers that has been parsed."""

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def text(self) -> str:
        """Its source."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def _tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def _classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self._tree.body if isinstance(node, ast.ClassDef)}

    @cached_property
    def _imported(self) -> dict[str, Path]:
        """The file that each name comes from, of names that come from files beside this one or above it."""
        found = {}
        for node in self._tree.body:
            if isinstance(node, ast.ImportFrom) and node.level and node.module:
                path = self.path.parents[node.level - 1].joinpath(*node.module.split(".")).with_suffix(".py")
                found |= {alias.asname or alias.name: path for alias in node.names}
        return found

    def find(self, name: str) -> Definition | None:
        """A class that is defined in this file, or that it imports from another."""
        if name in self._classes:
            return Definition(self._classes[name], self)
        if (path := self._imported.get(name)) is not None and path.is_file():
            return source_file(path).find(name)
        return None

    def pairs(self, variable: str) -> dict[str, str]:
        """What the table `variable` says: `("key", "value")` or `"key": "value"`, wherever it is made or extended."""
        found, lines = {}, self.text.splitlines()
        for node in self._tree.body:
            if not re.match(rf"{variable}( = |\.update\()", lines[node.lineno - 1]):
                continue
            for child in ast.walk(node):
                if isinstance(child, ast.Tuple) and len(child.elts) == 2:
                    found |= _strings([child.elts[0]], [child.elts[1]])
                elif isinstance(child, ast.Dict):
                    found |= _strings(child.keys, child.values)
        return found


@cache
def source_file(path: Path) -> SourceFile:
    """A file of Transformers, parsed once."""
    return SourceFile(path)


@cache
def table(variable: str) -> dict[str, str]:
    """A table by model type, of those behind the Auto classes."""
    auto = package() / "models" / "auto"
    files = [auto / f"{name}.py" for name in ("auto_mappings", "configuration_auto", "modeling_auto")]
    return {key: value for file in files if file.is_file() for key, value in source_file(file).pairs(variable).items()}


@dataclass(frozen=True)
class FamilySource:
    """What there is to know of a family before its two files can be written.

    configuration, modeling: the modules of its classes, from `transformers.models`.
    config, pretrained, layer: names of its classes.
    heads: the name of its class behind each Auto class, by suffix, the base model first.
    generative: which of them have `generate` from a base of their own.
    cut: the branches of the layer.
    cut_from: digest of the layer's `forward`.
    positional: names of the arguments, besides the stream, that the base model gives a layer by their place.
    takes_index: whether a layer is made of the config and its index, or of the config alone.
    modules: names of the attributes that the base model's own `__init__` sets.
    predicting_norm: the attribute of the layer that dynamic coefficients take their norm from; None without any.
    norm: the initial value of each parameter of that norm.
    """

    model_type: str
    configuration: str
    modeling: str
    config: str
    pretrained: str
    layer: str
    heads: dict[str, str]
    generative: frozenset[str]
    cut: Cut
    cut_from: str
    positional: tuple[str, ...]
    takes_index: bool
    modules: frozenset[str]
    predicting_norm: str | None
    norm: dict[str, float]


@cache
def read_family(model_type: str) -> FamilySource:
    """What Transformers' source says of a model type.

    Raises `UnsupportedCheckpointError` when Transformers doesn't have it, or its layers are not of the form that
    hyper-connections replace.
    """
    config = table("CONFIG_MAPPING_NAMES").get(model_type)
    if config is None:
        raise UnsupportedCheckpointError(f"Transformers {release()} has no model type {model_type!r:.60}.")
    configuration = _module("configuration", model_type)
    named = {suffix: table(variable).get(model_type) for suffix, variable in MAPPINGS.items()}
    modeling = _module("modeling", model_type) or _module("modeling", _first_with(named["Model"]))
    if configuration is None or modeling is None or named["Model"] is None:
        raise UnsupportedCheckpointError(f"Transformers {release()} has no base model of {model_type!r} in a file.")
    file = source_file(_path(modeling))
    found = {suffix: definition for suffix, name in named.items() if name and (definition := file.find(name))}
    base = found.get("Model")
    if base is None or source_file(_path(configuration)).find(config) is None:
        raise UnsupportedCheckpointError(f"transformers.models.{modeling} defines no {named['Model']}.")
    layer, takes_index = _layer_of(base)
    forward, of_forward = layer.method("forward")
    loop = base.method("forward")
    pretrained = next((each.name for each in base.lineage() if "PreTrainedModel" in each.bases), None)
    if loop is None or pretrained is None:
        raise UnsupportedCheckpointError(f"{base.name} has no forward, or no PreTrainedModel, that its source shows.")
    positional = check_layer_loop(loop[0], base.name)
    norm, values = _norm_of(layer)
    return FamilySource(
        model_type=model_type,
        configuration=configuration,
        modeling=modeling,
        config=config,
        pretrained=pretrained,
        layer=layer.name,
        heads={suffix: definition.name for suffix, definition in found.items()},
        generative=frozenset(suffix for suffix, definition in found.items() if "GenerationMixin" in definition.bases),
        cut=cut_branches(forward, of_forward.text, layer.name),
        cut_from=digest(ast.get_source_segment(of_forward.text, forward)),
        positional=tuple(argument.arg for argument in forward.args.args[2 : 2 + positional]),
        takes_index=takes_index,
        modules=_attributes(base),
        predicting_norm=norm,
        norm=values,
    )


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


def _layer_of(base: Definition) -> tuple[Definition, bool]:
    """The class of which a base model's `layers` are made, and whether of an index, too.

    Raises `UnsupportedCheckpointError` when it has none, or not of one class.
    """
    made = base.method("__init__")
    for node in ast.walk(made[0]) if made else ():
        match node:
            case ast.Assign(
                targets=[ast.Attribute(ast.Name("self"), "layers")],
                value=ast.Call(
                    args=[ast.ListComp(ast.Call(ast.Name(name)) as call, [ast.comprehension(target, over)])]
                ),
            ):
                layer = made[1].find(name)
                if layer is None or layer.method("forward") is None:
                    continue
                takes_index = _takes_index(call, ast.unparse(target), layer)
                if takes_index is not None and ast.unparse(over).startswith("range("):
                    return layer, takes_index
    raise UnsupportedCheckpointError(
        f"{base.name} has no `layers` of one class, made of a config and an index, so it can't be converted."
    )


def _takes_index(call: ast.Call, index: str, layer: Definition) -> bool | None:
    """Whether `Layer(config, index)` is called, or `Layer(config)`; None for another call."""
    if (init := layer.method("__init__")) is None:
        return None
    names = [argument.arg for argument in init[0].args.args[1:]]
    given = [(name, ast.unparse(node)) for name, node in zip(names, call.args, strict=False)]
    given += [(keyword.arg, ast.unparse(keyword.value)) for keyword in call.keywords]
    for values in (["config"], ["config", index]):
        if given == [*zip(names, values, strict=False)]:
            return len(values) > 1
    return None


def _attributes(base: Definition) -> frozenset[str]:
    """The names of `self.name = ...` in a class's `__init__`."""
    found = set()
    for node in ast.walk(base.method("__init__")[0]):
        match node:
            case ast.Assign(targets=[ast.Attribute(ast.Name("self"), name)]):
                found.add(name)
    return frozenset(found)


def _norm_of(layer: Definition) -> tuple[str | None, dict[str, float]]:
    """The attribute of the norm that predicts dynamic coefficients, and the start of its parameters.

    The norm before the MLP where there is one of the usual name, else the layer's first. It is None where there is
    none of which the source tells how its parameters start; an RMSNorm of torch then stands for it.
    """
    init, file = layer.method("__init__")
    norms = {}
    for node in ast.walk(init):
        match node:
            case ast.Assign(targets=[ast.Attribute(ast.Name("self"), name)], value=value) if "norm" in name:
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
    return None if None in found.values() else found


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
                function = ast.unparse(value.func) if isinstance(value, ast.Call) else None
                found[name] = {"torch.ones": 1.0, "torch.zeros": 0.0}.get(function)
    return found


def _strings(keys: list[ast.expr | None], values: list[ast.expr]) -> dict[str, str]:
    """The pairs in which both are strings; of a tuple of class names the first."""
    found = {}
    for key, value in zip(keys, values, strict=True):
        if isinstance(value, ast.Tuple) and value.elts:
            value = value.elts[0]
        if all(isinstance(node, ast.Constant) and isinstance(node.value, str) for node in (key, value)):
            found[key.value] = value.value
    return found
