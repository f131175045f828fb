"""A statement of a layer's `forward`: the names that it assigns and reads, and its effect on the residual stream.

`streams` are the names of the stream before the statement.
"""

import ast
import builtins
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Statement(NamedTuple):
    """A statement that runs.

    text: its source with the comments above it, without indentation.
    given: an argument that must not be None for the statement to run; None without one.
    """

    node: Any
    text: str
    given: str | None = None


def statement_of(text: str, given: str | None = None) -> Statement:
    """Parse a statement; positions in the node refer to the text."""
    return Statement(ast.parse(text).body[0], text, given)


def names(*trees: ast.AST) -> Iterator[ast.Name]:
    """Yield every use of a name."""
    return (node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name))


def assigned_names(*trees: ast.AST) -> set[str]:
    """Return the names that are assigned."""
    return {name.id for name in names(*trees) if isinstance(name.ctx, ast.Store)}


def read_names(*trees: ast.AST) -> set[str]:
    """Return the names that are read and never assigned."""
    return {name.id for name in names(*trees)} - assigned_names(*trees)


def read_before_assigned(trees: Iterable[ast.AST]) -> set[str]:
    """Return the names that are read before every path has assigned them.

    A statement with statements inside reads all its names before it assigns any.
    """
    assigned: set[str] = set()
    early: set[str] = set()
    for tree in trees:
        uses = {name.id for name in names(tree) if not isinstance(name.ctx, ast.Store)}
        for node in ast.walk(tree):
            if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
                uses.add(node.target.id)
        early |= uses - assigned
        if isinstance(tree, ast.Assign | ast.AnnAssign):
            assigned |= assigned_names(tree)
    return early


def global_names(trees: Iterable[ast.AST], own: set[str]) -> frozenset[str]:
    """Return the globals of a module that are read, without the names `own` and Python's."""
    return frozenset(read_names(*trees) - own - vars(builtins).keys())


def attributes_called(*trees: ast.AST) -> list[str]:
    """Return the attributes of `self` that are called, or whose elements are called, in their order."""
    attributes: dict[str, None] = {}
    for node in (node for tree in trees for node in ast.walk(tree)):
        match node:
            case (
                ast.Call(ast.Attribute(ast.Name("self"), name))
                | ast.Call(ast.Subscript(ast.Attribute(ast.Name("self"), name)))
                | ast.Call(ast.Attribute(ast.Subscript(ast.Attribute(ast.Name("self"))), name))
            ):
                attributes[name] = None
    return [*attributes]


def is_copy(statement: ast.stmt, streams: set[str]) -> bool:
    """Tell whether a statement is `name = stream`."""
    match statement:
        case ast.Assign(targets=[ast.Name()], value=ast.Name(name)):
            return name in streams
    return False


def added_to(statement: ast.stmt, streams: set[str]) -> ast.expr | None:
    """Return X of `name = stream + X` or `name = X + stream`."""
    match statement:
        case ast.Assign(targets=[ast.Name()], value=ast.BinOp(ast.Name(name), ast.Add(), added)) if name in streams:
            return added
        case ast.Assign(targets=[ast.Name()], value=ast.BinOp(added, ast.Add(), ast.Name(name))) if name in streams:
            return added
    return None


def added_twice(statement: Statement, streams: set[str]) -> tuple[Statement, Statement] | None:
    """Split `name = stream + X + Y`, which is added in that order, into two additions; None for another statement."""
    match statement.node:
        case ast.Assign([ast.Name(name)], ast.BinOp(ast.BinOp(ast.Name(stream), ast.Add(), first), ast.Add(), second)):
            if stream in streams:
                texts = f"{name} = {stream} + {ast.unparse(first)}", f"{name} = {name} + {ast.unparse(second)}"
                return statement_of(texts[0], statement.given), statement_of(texts[1], statement.given)
    return None


def added_in_another_shape(statement: ast.stmt, reshaped: set[str]) -> ast.expr | None:
    """Return `X.view(shape)` of `name = (stream + X).view(shape)`, where the stream has another shape."""
    match statement:
        case ast.Assign(
            targets=[ast.Name()],
            value=ast.Call(ast.Attribute(ast.BinOp(ast.Name(name), ast.Add(), added), "view"), [shape], []),
        ) if name in reshaped:
            return ast.Call(ast.Attribute(added, "view", ast.Load()), [shape], [])
    return None


def reshapes(statement: ast.stmt, streams: set[str]) -> bool:
    """Tell whether a statement is `name = stream.reshape(-1, stream.size(-1))`."""
    match statement:
        case ast.Assign(targets=[ast.Name()], value=value):
            return ast.unparse(value) in [f"{name}.reshape(-1, {name}.size(-1))" for name in streams]
    return False


def widens(statement: ast.stmt, streams: set[str]) -> tuple[str, str] | None:
    """Return the setting of `if self.setting: stream = stream.to(torch.float32)`, and that name."""
    match statement:
        case ast.If(
            test=ast.Attribute(ast.Name("self"), setting),
            body=[ast.Assign(targets=[ast.Name(name)], value=wide)],
            orelse=[],
        ) if name in streams and ast.unparse(wide) == f"{name}.to(torch.float32)":
            return setting, name
    return None


def changes_each_alike(statement: ast.stmt, streams: set[str]) -> str | None:
    """Return the name of the stream that a statement multiplies by an attribute of the layer, or clamps.

    Elementwise changes apply to several streams as to one. None for another statement.
    """
    changed = assigned_names(statement) & streams
    if len(changed) != 1:
        return None
    (name,) = changed
    if isinstance(statement, ast.If):
        if statement.orelse or not _asks_only_its_dtype(statement.test, name):
            return None
        others = [node for node in statement.body if name not in assigned_names(node)]
        changing = [node for node in statement.body if node not in others]
        is_apart = all(isinstance(node, ast.Assign) and _asks_only_its_dtype(node.value, name) for node in others)
        return name if is_apart and all(changes_each_alike(node, streams) == name for node in changing) else None
    match statement:
        case ast.Assign([ast.Name()], ast.Call(function, [ast.Name(first), *more], keywords)) if first == name:
            used = read_names(*more, *keywords)
            return name if ast.unparse(function) == "torch.clamp" and name not in used else None
        case ast.Assign([ast.Name()], ast.BinOp(ast.Name(first), ast.Mult(), ast.Attribute(ast.Name("self")))):
            return name if first == name else None
    return None


def _asks_only_its_dtype(expression: ast.expr, name: str) -> bool:
    """Tell whether an expression reads only the stream's dtype, or whether its values are finite."""
    reads = sum(node.id == name for node in names(expression))
    written = ast.unparse(expression)
    harmless = (f"{name}.dtype", f"torch.isinf({name}).any()", f"torch.isfinite({name}).all()")
    return reads == sum(map(written.count, harmless))


def changes_in_place(statement: ast.stmt, streams: set[str]) -> bool:
    """Tell whether a statement has `stream += ...`, `stream[...] = ...`, or a method call like `stream.add_`."""
    for node in ast.walk(statement):
        match node:
            case ast.AugAssign(target=ast.Name(name)) | ast.Subscript(ast.Name(name), ctx=ast.Store()):
                if name in streams:
                    return True
            case ast.Call(func=ast.Attribute(ast.Name(name), method)):
                if name in streams and method.endswith("_"):
                    return True
    return False


def returned_at_once(statement: ast.stmt, before: ast.stmt) -> ast.Return | None:
    """Return `return X` for `name = X` and `return name`; None for other statements."""
    match before, statement:
        case ast.Assign([ast.Name(name)], value), ast.Return(ast.Name(returned)) if name == returned:
            return ast.Return(value)
    return None


def with_sum_before_return(statements: list[Statement]) -> list[Statement]:
    """Split a last statement `return X + Y` into `hidden_states = X + Y` and `return hidden_states`."""
    match statements[-1].node:
        case ast.Return(ast.BinOp(op=ast.Add()) as total):
            written = f"hidden_states = {ast.unparse(total)}", "return hidden_states"
            return [*statements[:-1], *(statement_of(text, statements[-1].given) for text in written)]
    return statements


def names_returned(statement: ast.stmt) -> list[str] | None:
    """Return the names in `return stream` or `return stream, name`; None for another statement."""
    match statement:
        case ast.Return(ast.Name(name)):
            return [name]
        case ast.Return(ast.Tuple(elements)):
            returned = [element.id for element in elements if isinstance(element, ast.Name)]
            return returned if len(returned) == len(elements) else None
    return None
