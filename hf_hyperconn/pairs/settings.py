"""The statements of a layer that run, where that is for settings to say: those of most checkpoints, or one layer's."""

import ast
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field

from .source_files import Definition


def fields_of_layer(layer: Definition, config: Definition) -> dict[str, tuple[str, object]]:
    """The field of the config behind each expression in the layer's `forward` that stands for one, and its default."""
    defaults = config.constants()
    found = {f"self.config.{name}": (name, value) for name, value in defaults.items()}
    init = layer.method("__init__")
    assigned = [node for node in ast.walk(init[0]) if isinstance(node, ast.Assign)] if init else []
    targets = [ast.unparse(target) for node in assigned for target in node.targets]
    for node in assigned:
        match node:
            case ast.Assign([ast.Attribute(ast.Name("self")) as target], ast.Attribute(ast.Name("config"), name)):
                written = ast.unparse(target)
                if name in defaults and targets.count(written) == 1:
                    found[written] = (name, defaults[name])
    return found


class Choice:
    """A choice between the statements of a forward."""

    def statements(self, body: list[ast.stmt], line: int) -> Iterator[tuple[int, ast.stmt]]:
        """The statements that run, each with the line that its own, comments above it included, come after.

        line: that of the first of them.
        """
        for node in body:
            if isinstance(node, ast.If) and (runs := self.decide(node)) is not None and not self._is_cut(node, runs):
                chosen = node.body if runs else node.orelse
                if chosen:
                    yield from self.statements(chosen, node.test.end_lineno if runs else chosen[0].lineno - 1)
            else:
                yield line, node
            line = node.end_lineno

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
class Settled(Choice):
    """A choice by the settings of a config.

    fields: the field of the config behind an expression, as `self.use_parallel_residual`, and the value to take.
    optional: arguments of the forward that are None unless they are given, and stay what they are.
    required: the value of each field that the choice rests on.
    absent: the arguments that it takes as not given.
    """

    fields: Mapping[str, tuple[str, object]]
    optional: frozenset[str]
    required: dict[str, object] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)

    def decide(self, node: ast.If) -> bool | None:
        match node.test:
            case ast.Compare(ast.Name(name), [ast.IsNot()], [ast.Constant(None)]):
                if name not in self.optional or not any(map(_adds, ast.walk(node))):
                    return None
                self.absent.add(name)
                return False
        used: dict[str, object] = {}
        value = self._value(node.test, used)
        if value is not None:
            self.required |= used
        return value

    def _value(self, test: ast.expr, used: dict[str, object]) -> bool | None:
        """Whether the test of an `if` holds; None when that is not for these fields to say."""
        match test:
            case ast.Attribute() if (written := ast.unparse(test)) in self.fields:
                name, value = self.fields[written]
                used[name] = value
                return bool(value)
            case ast.UnaryOp(ast.Not(), operand):
                value = self._value(operand, used)
                return None if value is None else not value
            case ast.BoolOp(operator, operands):
                values = [self._value(operand, used) for operand in operands]
                if None in values:
                    return None
                return all(values) if isinstance(operator, ast.And) else any(values)
            case ast.Compare(ast.Attribute() as left, [ast.Eq()], [ast.Constant(constant)]):
                if (written := ast.unparse(left)) in self.fields:
                    name, value = self.fields[written]
                    used[name] = value
                    return value == constant
        return None


@dataclass
class OfLayer(Choice):
    """A choice by the attributes of a layer, but for private ones, which its methods may change later.

    layer: whose forward it is.
    stream: the name of its stream, `[B, S, D]`.
    """

    layer: object
    stream: str

    def statements(self, body, line):
        for after, node in super().statements(body, line):
            yield after, self._without_failure(node)

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

    def _without_failure(self, node: ast.stmt) -> ast.stmt:
        """An `if` whose body calls what this layer doesn't have, and so never ends, has nothing in it."""
        calls = [ast.unparse(child.func) for child in ast.walk(node) if isinstance(child, ast.Call)]
        missing = [name for name in calls if re.fullmatch(r"self\.\w+", name) and not hasattr(self.layer, name[5:])]
        if isinstance(node, ast.If) and not node.orelse and missing:
            return ast.copy_location(ast.If(node.test, [ast.Pass()], []), node)
        return node


@dataclass
class _OfThreeDimensions(ast.NodeTransformer):
    """Puts 3 in the place of `stream.ndim`."""

    stream: str

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return ast.Constant(3) if ast.unparse(node) == f"{self.stream}.ndim" else node


def _adds(node: ast.AST) -> bool:
    """Whether it is `name = X + Y`."""
    match node:
        case ast.Assign([ast.Name()], ast.BinOp(op=ast.Add())):
            return True
    return False
