"""Where a base model has its layers, read from the source of its `__init__`."""

import ast
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from ..errors import UnsupportedCheckpointError
from .source_files import Definition


@dataclass(frozen=True)
class Stack:
    """A list of layers of one class.

    path: from the base model, as `layers` or `encoder.layers`.
    owner: the class whose attribute it is.
    layer: the class of the layers.
    takes_index: whether a layer is made of the config and its index, or of the config alone.
    """

    path: str
    owner: Definition
    layer: Definition
    takes_index: bool


def find_stack(base: Definition, counts: Collection[str | None]) -> Stack:
    """The layers of a base model.

    counts: the names of the field of its config that says how many.

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


def _stacks(owner: Definition, counts: Collection[str | None]) -> Iterator[Stack]:
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
                takes_index = _takes_index(call, ast.unparse(target), layer)
                if takes_index is not None and ast.unparse(over) in [f"range(config.{count})" for count in counts]:
                    yield Stack(attribute, owner, layer, takes_index)
            case ast.Assign(
                targets=[ast.Attribute(ast.Name("self"), attribute)],
                value=ast.Call(ast.Name(name), [ast.Name("config")]),
            ):
                if (part := made[1].find(name)) is not None:
                    for stack in _stacks(part, counts):
                        yield Stack(f"{attribute}.{stack.path}", stack.owner, stack.layer, stack.takes_index)


def _takes_index(call: ast.Call, index: str, layer: Definition) -> bool | None:
    """Whether `Layer(config, index)` is called, or `Layer(config)`; None for another call."""
    if (init := layer.method("__init__")) is None:
        return None
    names = [argument.arg for argument in init[0].args.args[1:]]
    given: list[tuple[str | None, str]]
    given = [(name, ast.unparse(node)) for name, node in zip(names, call.args, strict=False)]
    given += [(keyword.arg, ast.unparse(keyword.value)) for keyword in call.keywords]
    for values in (["config"], ["config", index]):
        if given == [*zip(names, values, strict=False)]:
            return len(values) > 1
    return None
