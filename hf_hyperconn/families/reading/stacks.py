"""Where a base model has its layers, read from the source of its `__init__`."""

import ast
import builtins
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

from ...errors import UnsupportedCheckpointError
from .source_files import Definition, SourceFile


@dataclass(frozen=True)
class Stack:
    """A list of layers.

    path: from the base model, as `layers` or `encoder.layers`.
    owner: the class whose attribute it is.
    layers: the classes of the layers.
    count: the field of the config that says how many.
    """

    path: str
    owner: Definition
    layers: tuple[Definition, ...]
    count: str


@dataclass(frozen=True)
class Inner:
    """A model that a base model has its layers in.

    definition: its class.
    known: fields of its config that have other values than those of the whole.
    renamed: fields of its config that have the value of another of the whole.
    """

    definition: Definition
    known: dict[str, object]
    renamed: dict[str, str]


def find_inner_models(base: Definition) -> dict[str, Inner]:
    """Return the encoder and the decoder of the same config that a base model has its layers in, by attribute.

    A decoder may be alone. An encoder alone is a module of the model like others.
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

    counts: the usual names of the field of its config that says how many, which decide between several.

    Raises `UnsupportedCheckpointError` when it has none, or at several places.
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
    """Tell whether it is `nn.ModuleList(...)`."""
    return isinstance(value, ast.Call) and ast.unparse(value.func).endswith("ModuleList")


def _fillings(init: ast.FunctionDef, attribute: str, value: Any) -> Iterator[tuple[ast.expr, ast.expr]]:
    """Yield what a list is filled over, and its elements: by a comprehension, or a loop that appends."""
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
    """Return the classes that are called, also by another name; none unless all are classes with a forward."""
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
    """Return the names of the classes that a variable of an `__init__` may stand for; of a class its own."""
    for node in ast.walk(init):
        match node:
            case ast.Assign([ast.Name(target)], ast.Subscript(ast.Name(table))) if target == name:
                return file.classes_in(table)
    return [name]


def _count(over: ast.expr, init: ast.FunctionDef) -> str | None:
    """Return the field of the config that says over how many a loop goes; None where there is no telling.

    It is that of `range(config.field)`, or of a variable's value; for a loop over the kinds of layers the usual one.
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
