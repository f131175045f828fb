"""Where a base model has its layers, read from the source of its `__init__`."""

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

from ..errors import UnsupportedCheckpointError
from .source_files import Definition


@dataclass(frozen=True)
class Stack:
    """A list of layers of one class.

    path: from the base model, as `layers` or `encoder.layers`.
    owner: the class whose attribute it is.
    layer: the class of the layers.
    takes_index: whether a layer is made of the config and its index, or of the config alone.
    count: the field of the config that says how many.
    """

    path: str
    owner: Definition
    layer: Definition
    takes_index: bool
    count: str


def find_inner_models(base: Definition) -> dict[str, Definition]:
    """The models of the same config that a base model has its layers in, an encoder, a decoder or both, by attribute.

    An encoder alone may be asked for nothing by itself, and is a part of the model like others.
    """
    if (made := base.method("__init__")) is None:
        return {}
    found = {}
    for node in ast.walk(made[0]):
        match node:
            case ast.Assign(
                [ast.Attribute(ast.Name("self"), "encoder" | "decoder" as attribute)],
                ast.Call(ast.Name(name), [ast.Name("config")], []),
            ):
                each = made[1].find(name)
                if each is not None and any("PreTrainedModel" in of.bases for of in each.lineage()):
                    found[attribute] = each
    return found if "decoder" in found else {}


def find_stack(base: Definition, counts: Collection[str | None] | None = None) -> Stack:
    """The layers of a base model.

    counts: the names that the field of its config that says how many may have; None for any.

    Raises `UnsupportedCheckpointError` when it has none, not of one class, or at several places.
    """
    found = [*_stacks(base, counts)]
    if len(found) == 1:
        return found[0]
    if found:
        places = ", ".join(stack.path for stack in found)
        raise UnsupportedCheckpointError(f"{base.name} has layers at several places ({places}).")
    raise UnsupportedCheckpointError(
        f"{base.name} has no list of layers of one class, made of a config and an index, so it can't be converted."
    )


def _stacks(owner: Definition, counts: Collection[str | None] | None) -> Iterator[Stack]:
    if (made := owner.method("__init__")) is None:
        return
    for node in ast.walk(made[0]):
        match node:
            case ast.Assign(
                targets=[ast.Attribute(ast.Name("self"), attribute)],
                value=ast.Call(
                    args=[ast.ListComp(ast.Call(ast.Name(name)) as call, [ast.comprehension(target, over)])]
                ),
            ):
                layer = made[1].find(name)
                if layer is None or layer.method("forward") is None:
                    continue
                takes_index, count = _takes_index(call, ast.unparse(target), layer), _count(over)
                if takes_index is not None and count is not None and (counts is None or count in counts):
                    yield Stack(attribute, owner, layer, takes_index, count)
            case ast.Assign(
                targets=[ast.Attribute(ast.Name("self"), attribute)],
                value=ast.Call(ast.Name(name), [ast.Name("config")]),
            ):
                if (part := made[1].find(name)) is not None:
                    for stack in _stacks(part, counts):
                        yield replace(stack, path=f"{attribute}.{stack.path}")


def _count(over: ast.expr) -> str | None:
    """The field of `range(config.field)`."""
    match over:
        case ast.Call(ast.Name("range"), [ast.Attribute(ast.Name("config"), field)], []):
            return field
    return None


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
