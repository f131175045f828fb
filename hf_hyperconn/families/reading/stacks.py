"""The place of a base model's layers, read from its `__init__`: its own list, or an inner model.

An inner model may have the same config, as encoder and decoder do, or a field of the config, as a language model does.
"""

import ast
import builtins
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any, cast

from ...errors import UnsupportedCheckpointError
from .source_files import Definition, SourceFile, table

TEXT = "text_config"  # of the config, as Transformers' `get_text_config` has it
PART_CONFIG = re.compile(r"(?:self\.)?config\.(\w+_config)")
AUTO = "AutoModel.from_config"
LISTS = ("layers", "layer", "blocks", "block")


@dataclass(frozen=True)
class Stack:
    """A list of layers.

    path: path from the base model, as `layers` or `encoder.layers`.
    owner: the class with the list as an attribute.
    layers: classes of the layers.
    count: field of the config with the number of layers.
    """

    path: str
    owner: Definition
    layers: tuple[Definition, ...]
    count: str


@dataclass(frozen=True)
class Inner:
    """An inner model with the layers of a base model.

    definition: its class.
    known: fields of its config with constants that differ from the outer config.
    renamed: fields of its config with the value of another field of the outer config.
    """

    definition: Definition
    known: dict[str, object]
    renamed: dict[str, str]


def find_inner_models(base: Definition) -> dict[str, Inner]:
    """Return encoder and decoder of a base model with the same config, by attribute.

    A decoder may be alone. An encoder alone counts as any other module.
    """
    if (method := base.method("__init__")) is None:
        return {}
    init, file = method
    models: dict[str, Inner] = {}
    for node in ast.walk(init):
        match node:
            case ast.Assign(
                [ast.Attribute(ast.Name("self"), "encoder" | "decoder" as attribute)],
                ast.Call(ast.Name(name), [ast.Name(config)], []),
            ):
                definition = file.find(name)
                if definition is not None and definition.pretrained:
                    models[attribute] = Inner(definition, *_changes(config, init))
    return models if "decoder" in models else {}


def _changes(config: str, init: ast.FunctionDef) -> tuple[dict[str, object], dict[str, str]]:
    """Return the constants, and the other fields, that an `__init__` sets in a copy of its config."""
    constants: dict[str, object] = {}
    fields: dict[str, str] = {}
    for node in ast.walk(init):
        match node:
            case ast.Assign([ast.Attribute(ast.Name(name), field)], ast.Constant(value)) if name == config:
                constants[field] = value
            case ast.Assign([ast.Attribute(ast.Name(name), field)], ast.Attribute(ast.Name("config"), other)):
                if name == config:
                    fields[field] = other
    return constants, fields


def find_stack(base: Definition, counts: Collection[str | None] = ()) -> Stack:
    """Return the list of layers of a base model.

    counts: usual names of the field with the number of layers, which decide between several lists.

    Raises `UnsupportedCheckpointError` without a list, and with several.
    """
    stacks = [*_stacks(base)]
    stacks = [stack for stack in stacks if stack.count in counts] or stacks
    if len(stacks) == 1:
        return stacks[0]
    if stacks:
        places = ", ".join(stack.path for stack in stacks)
        raise UnsupportedCheckpointError(f"{base.name} has layers at several places ({places}).")
    raise UnsupportedCheckpointError(
        f"{base.name} has no list of layers whose classes its source shows, so it can't be converted."
    )


def _stacks(owner: Definition) -> Iterator[Stack]:
    if (method := owner.method("__init__")) is None:
        return
    init, file = method
    for node in ast.walk(init):
        match node:
            case ast.Assign([ast.Attribute(ast.Name("self"), attribute)], value) if _is_list(value):
                for over, elements in _fillings(init, attribute, value):
                    layers, count = _layers(elements, init, file), _count(over, init)
                    if layers and count is not None:
                        yield Stack(attribute, owner, layers, count)
            case ast.Assign(
                [ast.Attribute(ast.Name("self"), attribute)], ast.Call(ast.Name(name), [ast.Name("config")])
            ):
                if (module := file.find(name)) is not None:
                    for stack in _stacks(module):
                        yield replace(stack, path=f"{attribute}.{stack.path}")


def _is_list(value: ast.expr) -> bool:
    """Tell whether a value is `nn.ModuleList(...)`."""
    return isinstance(value, ast.Call) and ast.unparse(value.func).endswith("ModuleList")


def _fillings(init: ast.FunctionDef, attribute: str, value: Any) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield iterable and elements of the comprehension or loop that fills a list."""
    match value.args:
        case [ast.ListComp(element, [ast.comprehension(iter=over)])]:
            yield over, element
            return
        case [ast.Name(name)]:
            filled = name
        case _:
            filled = f"self.{attribute}"
    for loop in ast.walk(init):
        if isinstance(loop, ast.For):
            appended = [
                call.args[0]
                for call in ast.walk(loop)
                if isinstance(call, ast.Call) and ast.unparse(call.func) == f"{filled}.append" and call.args
            ]
            if appended:
                yield loop.iter, ast.List(appended)


def _layers(elements: ast.expr, init: ast.FunctionDef, file: SourceFile) -> tuple[Definition, ...]:
    """Return the called classes, also by variables; none unless all are classes with a forward."""
    called = [
        node.func.id
        for node in ast.walk(elements)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not hasattr(builtins, node.func.id)
    ]
    names = dict.fromkeys(name for variable in called for name in _meant(variable, init, file))
    classes = [definition for name in names if (definition := file.find(name)) is not None]
    is_whole = len(classes) == len(names) and all(definition.method("forward") for definition in classes)
    return tuple(classes) if is_whole else ()


def _meant(name: str, init: ast.FunctionDef, file: SourceFile) -> list[str]:
    """Return the names of the classes that a variable of an `__init__` may mean; a class means itself."""
    for node in ast.walk(init):
        match node:
            case ast.Assign([ast.Name(target)], ast.Subscript(ast.Name(table))) if target == name:
                return file.classes_in(table)
    return [name]


def _count(over: ast.expr, init: ast.FunctionDef) -> str | None:
    """Return the field of the config with the number of iterations of a loop; None if not known.

    It comes from `range(config.field)`, or a variable's value. A loop over the kinds of layers has the usual field.
    """
    for node in ast.walk(over):
        match node:
            case ast.Attribute(value, field) if ast.unparse(value).endswith("config") or field == "layers_block_type":
                if field.endswith(("_types", "_type")):
                    return "num_hidden_layers"
                if "layer" in field or "depth" in field:
                    return field
            case ast.Name(name):
                for assigned in ast.walk(init):
                    match assigned:
                        case ast.Assign([ast.Name(target)], value) if target == name and value is not over:
                            if (count := _count(value, init)) is not None:
                                return count
    return None


@dataclass(frozen=True)
class Part:
    """An inner model with a config of its own.

    attribute: attribute of the outer base model.
    field: field of the outer config with its config.
    name: name of its class; None where `AutoModel` finds it.
    """

    attribute: str
    field: str
    name: str | None

    @property
    def called(self) -> str:
        """Return the name of the part in messages."""
        return "language model" if self.field == TEXT else self.attribute


def find_parts(base: Definition) -> list[Part]:
    """Return the inner models of a base model with configs of their own."""
    init = base.method("__init__")
    return [*_parts(init[0])] if init else []


def find_part(base: Definition, stack: str | None) -> Part | None:
    """Return the inner model with the layers: the language model, or the one at `stack`; None without any.

    stack: attribute of another inner model, such as a vision tower.

    Raises `UnsupportedCheckpointError` when the outer model reaches into it, and for an unknown attribute.
    """
    parts = find_parts(base)
    chosen = [part for part in parts if (part.field == TEXT if stack is None else part.attribute == stack)]
    if len(chosen) != 1:
        if stack is None:
            return None
        others = ", ".join(part.attribute for part in parts) or "one list of layers"
        raise UnsupportedCheckpointError(f"{base.name} has {others}, and no {stack!r:.40} with layers.")
    (part,) = chosen
    if _reaches_into(base, part.attribute):
        raise UnsupportedCheckpointError(f"{base.name} reaches into the layers of its {part.called}.")
    twins = [other.attribute for other in parts if other.field == part.field]
    if stack is not None and twins != [stack]:
        raise UnsupportedCheckpointError(f"{base.name} makes {' and '.join(twins)} of one config, {part.field}.")
    return part


def type_of_part(part: Part, config: Definition, chosen: str | None) -> str:
    """Return the model type of a part.

    chosen: the model type that a config chooses; None for the usual one.

    Raises `UnsupportedCheckpointError` when it is not known, or can't be chosen.
    """
    if chosen and part.name is not None:
        raise UnsupportedCheckpointError(f"{config.name} takes nothing but a {part.name}, of no other model type.")
    if (model_type := chosen or usual_type(config, part.field)) is None:
        raise UnsupportedCheckpointError(f"the source of {config.name} does not tell which {part.called} it has.")
    return model_type


def _parts(init: ast.FunctionDef) -> Iterator[Part]:
    configs = {}
    for node in ast.walk(init):
        match node:
            case ast.Assign([ast.Name(variable)], value) if PART_CONFIG.fullmatch(source := ast.unparse(value)):
                configs[variable] = source
    for node in ast.walk(init):
        match node:
            case ast.Assign(
                [ast.Attribute(ast.Name("self"), attribute)],
                ast.Call(called, [given], []) | ast.Call(called, [], [ast.keyword("config", given)]),
            ):
                text, name = ast.unparse(given), ast.unparse(called)
                if of_part := PART_CONFIG.fullmatch(configs.get(text, text)):
                    yield Part(attribute, of_part[1], None if name == AUTO else name.removesuffix("._from_config"))


def usual_type(config: Definition, field: str) -> str | None:
    """Return the model type of a field, where a config names none."""
    types = {name: model_type for model_type, name in table("CONFIG_MAPPING_NAMES").items()}
    for definition in config.lineage():
        for node in definition.node.body:
            match node:
                case ast.Assign([ast.Name("sub_configs_defaults" | "sub_configs")], ast.Dict(keys, values)):
                    for key, value in zip(keys, values, strict=True):
                        if isinstance(key, ast.Constant) and key.value == field:
                            return _type_of(value, types)
    return None


def _type_of(value: ast.expr, types: dict[str, str]) -> str | None:
    """Return the model type of a config class or of `SubConfigSpec(config_class=..., model_type=...)`."""
    if isinstance(value, ast.Call):
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        if isinstance(model_type := given.get("model_type"), ast.Constant):
            return cast("str | None", model_type.value)
        value = given.get("config_class", value)
    return types.get(ast.unparse(value))


def _reaches_into(base: Definition, attribute: str) -> bool:
    """Tell whether a model uses the layers of its inner model itself."""
    return any(
        isinstance(node, ast.Attribute) and node.attr in LISTS and f".{attribute}." in ast.unparse(node)
        for definition in base.lineage()
        for node in ast.walk(definition.node)
    )
