"""The places of attention weights that Transformers records at modules whose statements stand in a branch.

Hooks of `output_attentions=True` see what a module returns when it is called. T5's `T5LayerSelfAttention` is not, as
it adds to the stream; but the `T5Attention` in it returns the same weights.
"""

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from .additions import returned_at_once
from .inlining import assigned_classes
from .source_files import Definition


class Recorder(NamedTuple):
    """The place of an output: a class of modules, the place in what they return, and the attribute that has them."""

    owner: str
    place: int
    attribute: str


def moved_recorders(base: Definition, inlined: Iterable[Definition]) -> dict[str, Recorder]:
    """Return the recorders of a model that belong elsewhere, by the key of what they record.

    inlined: the classes of modules whose statements stand in branches.
    """
    modules = {module.name: module for module in inlined}
    return {
        key: recorder
        for key, name, place in _recorders(base)
        if name in modules
        for recorder in _same_inside(modules[name], place)
    }


def _recorders(base: Definition) -> Iterator[tuple[str, str, int]]:
    """Yield the key of each recorded output, the class of its modules and the place in what they return."""
    recorders = base.dict_of("_can_record_outputs")
    for key, value in zip(recorders.keys, recorders.values, strict=True):
        match key, value:
            case (
                ast.Constant(str(what)),
                ast.Call(ast.Name(), [ast.Name(name)], [ast.keyword("index", index)]),
            ):
                yield what, name, ast.literal_eval(index)


def _same_inside(definition: Definition, place: int) -> Iterator[Recorder]:
    """Yield the recorder of the module that makes what a module returns at a place."""
    forward, _ = definition.own_method("forward")
    last = forward.body[-1]
    match returned_at_once(last, forward.body[-2]) or last:
        case ast.Return(ast.Tuple(values)):
            wanted = ast.unparse(values[place])
        case ast.Return(ast.BinOp(ast.Tuple([_]), ast.Add(), ast.Subscript(ast.Name(wanted), ast.Slice()))):
            pass
        case _:
            return
    for node in forward.body:
        match node:
            case ast.Assign([target], ast.Call(ast.Attribute(ast.Name("self"), attribute))):
                names = [*map(ast.unparse, target.elts if isinstance(target, ast.Tuple) else [target])]
                index = names.index(wanted) if wanted in names and len(names) > 1 else place
                for owner in assigned_classes(definition, attribute) if wanted in names else ():
                    yield Recorder(owner.name, index, attribute)
