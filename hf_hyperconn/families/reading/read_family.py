"""Reading a family from the source of the installed Transformers, of which nothing is imported or run."""

import ast
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from ...errors import UnsupportedCheckpointError
from ...models.layer_source import CutFrom, digest_of_functions
from ..family_source import PLACE_MARK, Cut, FamilySource, InnerModel, LayerSource
from .branches import cut_branches_of_class, layer_refusal
from .classes import FamilyName, class_names, first_with, module_of, named_by_init, path_of, within_another
from .inlining import assigned_classes, moved_recorders
from .loops import LayerLoop, read_layer_loop
from .source_files import Definition, FunctionSource, SourceFile, release, source_file, table
from .stacks import (
    TEXT,
    Inner,
    Part,
    Stack,
    find_inner_models,
    find_part,
    find_parts,
    find_stack,
    type_of_part,
    usual_type,
)

NORMS_OF_TORCH = {"nn.RMSNorm": {"weight": 1.0}, "nn.LayerNorm": {"weight": 1.0, "bias": 0.0}}
SIZES = ("num_hidden_layers", "hidden_size", "vocab_size")
BASE_OF_HEADS = "model"  # where language models with a head have their base model
# models whose hidden states lie so in memory, which the source doesn't show
CHANNELS_FIRST = ("Aimv2VisionModel", "Ovis2VisionModel", "VoxtralRealtimeEncoder")
PACKED = ("Lfm3VlVisionModel",)


@cache
def read_family(model_type: str) -> FamilySource:
    """Read a family from Transformers' source.

    model_type: a model type; a `FamilyName` with the inner model that has the layers; or `whisper:decoder`, an inner
        model of the same config.

    Raises `UnsupportedCheckpointError` for an unknown model type, and for layers of another form.
    """
    whole, _, place = model_type.partition(PLACE_MARK)
    if place:
        for inner in read_family(whole).inner:
            if inner.attribute == place:
                return inner.source
        raise UnsupportedCheckpointError(f"{whole!r} has no {place!r:.20} with layers.")
    name = FamilyName.of(model_type)
    known = _read_classes(model_type, name.own)
    if not name.chosen and (models := find_inner_models(known.base)):
        return _with_inner_models(known, models, name.stack)
    if (part := find_part(known.base, name.stack)) is not None:
        return _with_part(known, part, type_of_part(part, known.of_config, name.chosen))
    if name.chosen:
        raise UnsupportedCheckpointError(f"{known.base.name} takes no language model of a type that a config chooses.")
    count = known.of_config.renamed().get("num_hidden_layers")
    backbone = {suffix: definition.name for suffix, definition in known.heads.items() if suffix == "Backbone"}
    heads = known.whole_heads | backbone
    stack = find_stack(known.base, ("num_hidden_layers", count))
    source = _with_stack({**known.of_family, "heads": heads}, known.base, known.of_config, stack)
    return _with_backbone(source, known, stack)


@cache
def fields_of_stacks(model_type: str) -> dict[str, str]:
    """Return the field of the config of each inner model that may have connections, by its attribute.

    The field is "" for an encoder and a decoder, which share the outer config.
    """
    try:
        base = _read_classes(model_type, model_type).base
    except UnsupportedCheckpointError:
        return {}
    if models := find_inner_models(base):
        return dict.fromkeys(models, "")
    return {part.attribute: part.field for part in find_parts(base)}


@dataclass(frozen=True)
class _Classes:
    """The classes of a model type.

    base: its base model.
    heads: the class behind each Auto class, by suffix.
    of_config: its config.
    of_family: the fields of `FamilySource` that name these classes.
    """

    base: Definition
    heads: dict[str, Definition]
    of_config: Definition
    of_family: dict[str, Any]

    @property
    def whole_heads(self) -> dict[str, str]:
        """Return the names of the base model and of the heads with a base model, by suffix."""
        return {
            suffix: head.name
            for suffix, head in self.heads.items()
            if head.name == self.base.name or named_by_init(head) & {self.base.name, "AutoModel"}
        }


def _read_classes(model_type: str, own_type: str) -> _Classes:
    """Read the classes of a model type.

    model_type: a `FamilyName`.
    own_type: its model type.
    """
    config = table("CONFIG_MAPPING_NAMES").get(own_type)
    if config is None:
        raise UnsupportedCheckpointError(f"Transformers {release()} has no model type {own_type!r:.60}.")
    configuration = module_of("configuration", own_type)
    named = class_names(own_type)
    modeling = module_of("modeling", own_type) or module_of("modeling", first_with(named["Model"]))
    if named["Model"] is None and modeling is not None:
        named["Model"] = within_another(source_file(path_of(modeling)), config)
    if configuration is None or modeling is None or named["Model"] is None:
        raise UnsupportedCheckpointError(f"Transformers {release()} has no base model of {own_type!r} in a file.")
    file = source_file(path_of(modeling))
    heads = {suffix: definition for suffix, name in named.items() if name and (definition := file.find(name))}
    base = heads.get("Model")
    of_config = source_file(path_of(configuration)).find(config)
    if base is None or of_config is None:
        raise UnsupportedCheckpointError(f"transformers.models.{modeling} defines no {named['Model']}.")
    if base.pretrained is None:
        raise UnsupportedCheckpointError(f"{base.name} is no PreTrainedModel that its source shows.")
    of_family = {
        "model_type": model_type,
        "configuration": configuration,
        "modeling": modeling,
        "config": config,
        "pretrained": base.pretrained.name,
        "in_heads": base.pretrained.string("base_model_prefix"),
        "generative": frozenset(
            suffix for suffix, definition in heads.items() if "GenerationMixin" in definition.bases
        ),
    }
    return _Classes(base, heads, of_config, of_family)


def _with_backbone(source: FamilySource, known: _Classes, stack: Stack) -> FamilySource:
    """Add the encoder of a family's backbone, or drop a backbone with modules of its own."""
    backbone = known.heads.get("Backbone")
    if backbone is None or known.base.name in named_by_init(backbone):
        return source
    attribute, _, place = stack.path.rpartition(".")
    encoders = {definition.name for definition in assigned_classes(backbone, attribute)}
    if stack.owner.pretrained and stack.owner.name in encoders:
        encoder = replace(source, heads={"Model": stack.owner.name}, stack=place, layerdrop=None)
        return replace(source, of_backbone=(InnerModel(attribute, stack.owner.name, encoder),))
    return replace(source, heads={suffix: name for suffix, name in source.heads.items() if suffix != "Backbone"})


def _with_part(known: _Classes, part: Part, model_type: str) -> FamilySource:
    """Read a model whose inner model, of a model type, has the layers."""
    try:
        inner = read_family(model_type)
    except UnsupportedCheckpointError as error:
        raise UnsupportedCheckpointError(
            f"{known.base.name} has a {part.called} that can't be converted: {error}"
        ) from error
    if inner.part is not None or len(inner.inner) > 1:
        raise UnsupportedCheckpointError(f"the {part.called} of {known.base.name} has its layers in models in it.")
    name = part.name or inner.heads["Model"]
    if name not in inner.heads.values():
        raise UnsupportedCheckpointError(f"{known.base.name} has a {name} in it, no model of {inner.model_type!r}.")
    heads = {
        suffix: head
        for suffix, head in known.whole_heads.items()
        if head == known.base.name or head not in inner.heads.values()
    }
    of_inner = "" if name == inner.heads["Model"] else f".{BASE_OF_HEADS}"
    return replace(
        inner,
        **known.of_family,
        heads=heads,
        stack=f"{part.attribute}{of_inner}.{inner.stack}",
        part=InnerModel(part.attribute, name, inner, part.field),
        inner=(),
        outer=frozenset(),
        of_backbone=(),
    )


def _with_inner_models(known: _Classes, models: Mapping[str, Inner], stack: str | None) -> FamilySource:
    """Read a model that has its layers in an encoder and a decoder.

    stack: the stack with connections; None for both.
    """
    if stack not in (None, *models):
        raise UnsupportedCheckpointError(
            f"{known.base.name} has {', '.join(models)}, and no {stack!r:.40} with layers."
        )
    of_heads = {suffix: find_inner_models(head) for suffix, head in known.heads.items()}
    outer = {suffix: inner for suffix, inner in of_heads.items() if _classes_of(inner) == _classes_of(models)}
    connected = models if stack is None else {stack: models[stack]}
    is_one_class = len({*_classes_of(connected).values()}) < len(connected)
    inner_models = []
    for attribute, model in connected.items():
        of_model = {
            "model_type": f"{known.of_family['model_type']}{PLACE_MARK}{attribute}",
            "heads": {"Model": model.definition.name},
            "prefix": attribute.title() if is_one_class else "",
        }
        layers, renamed = find_stack(model.definition), [inner[attribute].renamed for inner in outer.values()]
        count = next((names[layers.count] for names in renamed if layers.count in names), layers.count)
        of_family, counted = {**known.of_family, **of_model}, replace(layers, count=count)
        source = _with_stack(of_family, model.definition, known.of_config, counted, model.known)
        inner_models.append(InnerModel(attribute, model.definition.name, source))
    if usual_type(known.of_config, TEXT) is not None:
        raise UnsupportedCheckpointError(f"{known.base.name} has its sizes in the {TEXT} of its config.")
    last = inner_models[-1]
    return replace(
        last.source,
        **known.of_family,
        heads={suffix: head.name for suffix, head in known.heads.items() if suffix in {**known.whole_heads, **outer}},
        prefix="",
        stack=f"{last.attribute}.{last.source.stack}",
        inner=tuple(inner_models),
        outer=frozenset(known.heads[suffix].name for suffix in outer),
    )


def _classes_of(models: Mapping[str, Inner]) -> dict[str, str]:
    """Return the name of the class of each model."""
    return {attribute: model.definition.name for attribute, model in models.items()}


def _with_stack(
    of_family: dict, base: Definition, of_config: Definition, stack: Stack, known: Mapping[str, object] | None = None
) -> FamilySource:
    """Read a model with one list of layers.

    of_family: known fields of `FamilySource`.
    known: values of fields that are fixed for these layers.
    """
    forward = stack.owner.method("forward")
    if forward is None:
        raise UnsupportedCheckpointError(f"{base.name} has no forward that its source shows.")
    attribute = stack.path.rpartition(".")[2]
    loop = read_layer_loop(forward[0], stack.owner.name, attribute, stack.owner)
    if loop.between and "." in stack.path:
        raise layer_refusal(
            stack.layers[0].name, f"{stack.owner.name}.{loop.between} changes the stream between layers"
        )
    run_by = FunctionSource.of(forward[0], stack.owner.file, stack.owner, attribute)
    cuts = [cut_branches_of_class(layer, of_config, known) for layer in stack.layers]
    layers = tuple(
        _layer_source(layer, cut, base.name, loop, run_by) for layer, cut in zip(stack.layers, cuts, strict=True)
    )
    for layer in layers[1:]:
        if _connections(layer) != _connections(layers[0]) or layers[0].norm.keys() != layer.norm.keys():
            raise layer_refusal(layer.name, f"it has other sub-layers than {layers[0].name}")
    defaults, renamed = of_config.constants(), of_config.renamed()
    if stack.count != "num_hidden_layers":
        renamed.setdefault("num_hidden_layers", stack.count)
    sizes = {usual: defaults.get(renamed.get(usual, usual)) for usual in SIZES}
    return FamilySource(
        **of_family,
        layers=layers,
        renamed=renamed,
        stack=stack.path,
        count=stack.count,
        modules=_attributes(base),
        loop=(stack.owner.name, digest_of_functions([(forward[0], "")], spelled=True)),
        between=loop.between,
        layerdrop=loop.layerdrop,
        recorders=moved_recorders(base, (module for cut in cuts for module in cut.inlined)),
        sizes={usual: value for usual, value in sizes.items() if value is not None},
        tied=defaults.get("tie_word_embeddings") is True,
    )


def _connections(layer: LayerSource) -> list[str]:
    return [sub_layer.connection for sub_layer in layer.cut.sub_layers]


def _layer_source(layer: Definition, cut: Cut, model: str, loop: LayerLoop, run_by: FunctionSource) -> LayerSource:
    """Read a class of layers after its branches have been cut.

    model: name of the class with the layers.
    run_by: the function that runs them.
    """
    forward, _ = layer.own_method("forward")
    if loop.takes_first != (cut.returned is not None):
        raise layer_refusal(layer.name, "it returns other than its model takes")
    subscripts = (ast.unparse(node) for node in ast.walk(forward) if isinstance(node, ast.Subscript))
    if f"{forward.args.args[1].arg}.shape[2]" in subscripts:
        raise layer_refusal(layer.name, "the stream has rows and columns, where a sequence is expected")
    norm, values = _norm_of(layer)
    return LayerSource(
        name=layer.name,
        cut=cut,
        cut_from=_cut_from(layer, forward, cut, run_by),
        positional=tuple(argument.arg for argument in forward.args.args[2 : 2 + loop.positional]),
        packed=model in PACKED
        or any(argument.arg == "cu_seqlens" for argument in (*forward.args.args, *forward.args.kwonlyargs)),
        channels_first=model in CHANNELS_FIRST,
        predicting_norm=norm,
        norm=values,
    )


def _cut_from(layer: Definition, forward: ast.FunctionDef, cut: Cut, run_by: FunctionSource) -> CutFrom:
    """Return the functions that the branches of a layer depend on, and their digests."""
    sources = [FunctionSource.of(forward, layer.file, layer), *cut.sources]
    if cut.settings:  # which are read from the attributes that it sets
        sources.append(FunctionSource.of(layer.own_method("__init__")[0], layer.file, layer))
    by_name = {source.name: source for source in (*sources, run_by)}
    functions = [(source.node, source.layers) for source in by_name.values()]
    return CutFrom(
        release(), tuple(by_name), digest_of_functions(functions), digest_of_functions(functions, spelled=True)
    )


def _attributes(base: Definition) -> dict[str, str]:
    """Return name and right side of each `self.name = ...` in a class's `__init__`."""
    values = {}
    for node in ast.walk(base.own_method("__init__")[0]):
        match node:
            case ast.Assign(targets=[ast.Attribute(ast.Name("self"), name)], value=value):
                values[name] = ast.unparse(value)
    return values


def _norm_of(layer: Definition) -> tuple[str | None, dict[str, float]]:
    """Return the attribute of the norm that predicts dynamic coefficients, and the start of its parameters.

    It is the norm before the MLP if it has the usual name, else the layer's first norm. It is None if the source does
    not tell how the parameters of any norm start; torch's RMSNorm then replaces it.
    """
    init, file = layer.own_method("__init__")
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
    """Return the start of a norm's parameters; None if not known."""
    written = ast.unparse(call.func)
    if written in NORMS_OF_TORCH:
        affine = {"elementwise_affine": "True", "bias": "True"}
        settings = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg != "eps"}
        return NORMS_OF_TORCH[written] if settings.items() <= affine.items() else None
    if (definition := file.find(written)) is None:
        return None
    values: dict[str, float | None] = {}
    for ancestor in reversed([*definition.lineage()]):
        if _has_modules(ancestor.node):
            return None
        values |= next((NORMS_OF_TORCH[base] for base in ancestor.bases if base in NORMS_OF_TORCH), {})
        values |= _parameters(ancestor.node)
    known = {name: value for name, value in values.items() if value is not None}
    return known if len(known) == len(values) else None


def _has_modules(definition: ast.ClassDef) -> bool:
    """Tell whether a class consists of other modules: `self.name = Class(...)`."""
    assigned = (node for node in ast.walk(definition) if isinstance(node, ast.Assign))
    calls = [node.value.func for node in assigned if isinstance(node.value, ast.Call)]
    return any(
        ast.unparse(call).rpartition(".")[2][:1].isupper() and "Parameter" not in ast.unparse(call) for call in calls
    )


def _parameters(definition: ast.ClassDef) -> dict[str, float | None]:
    """Return the start of each `self.name = nn.Parameter(torch.ones(...))`; None for another expression."""
    values = {}
    for node in ast.walk(definition):
        match node:
            case ast.Assign(
                targets=[ast.Attribute(ast.Name("self"), name)], value=ast.Call(func=called, args=[value, *_])
            ) if ast.unparse(called) in ("nn.Parameter", "torch.nn.Parameter"):
                function = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
                values[name] = {"torch.ones": 1.0, "torch.zeros": 0.0}.get(function)
    return values
