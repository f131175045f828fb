"""The names that pieces of source make and read."""

import ast
import builtins
from collections.abc import Iterable, Iterator


def names(nodes: list[ast.AST]) -> Iterator[ast.Name]:
    """Every use of a name."""
    return (node for node in nodes if isinstance(node, ast.Name))


def made(nodes: list[ast.AST]) -> set[str]:
    """What is assigned."""
    return {name.id for name in names(nodes) if isinstance(name.ctx, ast.Store)}


def read(nodes: list[ast.AST]) -> set[str]:
    """What is read, but for what is assigned, too."""
    return {name.id for name in names(nodes)} - made(nodes)


def read_before_made(parts: list[ast.AST]) -> set[str]:
    """What is read before every path has made it: of a statement with statements inside, all that it reads."""
    so_far: set[str] = set()
    found: set[str] = set()
    for part in parts:
        nodes = [*ast.walk(part)]
        changed = {
            node.target.id for node in nodes if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name)
        }
        found |= ({name.id for name in names(nodes) if not isinstance(name.ctx, ast.Store)} | changed) - so_far
        if isinstance(part, ast.Assign | ast.AnnAssign):
            so_far |= made(nodes)
    return found


def global_names(nodes: list[ast.AST], own: set[str]) -> frozenset[str]:
    """What is read of a module: neither its own, nor Python's."""
    return frozenset(read(nodes) - own - vars(builtins).keys())


def attributes_called(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """The attributes of `self` that are called, or of what stands in a list of its."""
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(ast.Name("self"), name)):
                yield name
            case ast.Call(func=ast.Subscript(ast.Attribute(ast.Name("self"), name))):
                yield name
            case ast.Call(func=ast.Attribute(ast.Subscript(ast.Attribute(ast.Name("self"))), name)):
                yield name
