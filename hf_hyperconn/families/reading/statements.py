"""A statement of a layer's `forward`, and the names that are assigned and read in it."""

import ast
import builtins
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple


class Statement(NamedTuple):
    """A statement that runs.

    text: its source, comments above it included, indented as at the top of a module.
    given: an argument that may be None; the statement runs when it is not.
    """

    node: Any
    text: str
    given: str | None = None


def statement_of(text: str, given: str | None = None) -> Statement:
    """Parse a statement; positions in the node are those in the text."""
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
    """Return the names that are read of a module: neither its own, nor Python's."""
    return frozenset(read_names(*trees) - own - vars(builtins).keys())


def attributes_called(*trees: ast.AST) -> list[str]:
    """Return the attributes of `self` that are called, or whose elements are, in their order."""
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
