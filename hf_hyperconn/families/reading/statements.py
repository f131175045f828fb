"""The statements of a layer's `forward` that run, and the choice between them by the attributes of one layer."""

import ast
import builtins
import re
from collections.abc import Iterable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from textwrap import dedent
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
    """A statement of its source; positions in the node are those in the text."""
    return Statement(ast.parse(text).body[0], text, given)


class Choice:
    """A choice between the statements of a forward.

    lines: of the source that it is from.
    """

    lines: list[str]

    def statements(self, body: list[ast.stmt], line: int, given: str | None = None) -> Iterator[Statement]:
        """The statements that run.

        line: after which the first of them comes, comments above it included. given: an argument on which they depend.
        """
        for node in body:
            if isinstance(node, ast.If) and given is None and (name := self.given(node)) is not None:
                yield from self.statements(node.body, node.test.end_lineno or line, name)
            elif isinstance(node, ast.If) and (runs := self.decide(node)) is not None and not self._is_cut(node, runs):
                chosen = node.body if runs else node.orelse
                if chosen:
                    before = node.test.end_lineno if runs else chosen[0].lineno - 1
                    yield from self.statements(chosen, before or line, given)
            else:
                yield self.statement(node, line, given)
            line = node.end_lineno or line

    def statement(self, node: ast.stmt, line: int, given: str | None) -> Statement:
        """One of them, which comes after a line."""
        match node:
            case ast.AugAssign(ast.Name(name), ast.Mult(), factor):  # in place it would change what others have, too
                return statement_of(f"{name} = {name} * {ast.unparse(factor)}", given)
        return statement_of(dedent("\n".join(self.lines[line : node.end_lineno])).strip("\n"), given)

    def given(self, node: ast.If) -> str | None:
        """The argument on which all of its body depends, as a branch of its own; None for another `if`."""
        return None

    def decide(self, node: ast.If) -> bool | None:
        """Whether its body runs; None where that is open."""
        raise NotImplementedError

    def _is_cut(self, node: ast.If, runs: bool) -> bool:
        """Whether an open `elif` would be left without its `if`."""
        match node.orelse:
            case [ast.If() as following] if not runs:
                return self.decide(following) is None
        return False


@dataclass
class OfLayer(Choice):
    """A choice by the attributes of a layer, but for private ones, which its methods may change later.

    lines: of the source that it is from.
    layer: whose forward it is.
    stream: the name of its stream, `[B, S, D]`.
    """

    lines: list[str]
    layer: object
    stream: str

    def statement(self, node: ast.stmt, line: int, given: str | None) -> Statement:
        """One of them; of an `if` whose body calls what this layer lacks, and so never ends, nothing is left."""
        found = super().statement(node, line, given)
        calls = [ast.unparse(child.func) for child in ast.walk(node) if isinstance(child, ast.Call)]
        missing = [name for name in calls if re.fullmatch(r"self\.\w+", name) and not hasattr(self.layer, name[5:])]
        if isinstance(found.node, ast.If) and not found.node.orelse and missing:
            return found._replace(node=ast.If(found.node.test, [ast.Pass()], []))
        return found

    def decide(self, node: ast.If) -> bool | None:
        """Whether its body runs, where the test compares constants and public attributes of the layer."""
        test = _OfThreeDimensions(self.stream).visit(deepcopy(node.test))
        for part in ast.walk(test):
            match part:
                case ast.Attribute(_, name) if not name.startswith("_"):
                    pass
                case ast.Name("self") | ast.Constant() | ast.List() | ast.Tuple() | ast.Load():
                    pass
                case ast.Compare() | ast.cmpop() | ast.BoolOp() | ast.boolop() | ast.UnaryOp() | ast.unaryop():
                    pass
                case _:
                    return None
        expression = compile(ast.fix_missing_locations(ast.Expression(test)), "<a test of the layer>", "eval")
        try:
            return bool(eval(expression, {"self": self.layer}))
        except AttributeError:
            return None


@dataclass
class _OfThreeDimensions(ast.NodeTransformer):
    """Puts 3 in the place of `stream.ndim`."""

    stream: str

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return ast.Constant(3) if ast.unparse(node) == f"{self.stream}.ndim" else node


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
