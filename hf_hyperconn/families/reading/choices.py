"""The statements of a layer's `forward` that run: chosen by the fields of a config, or by one layer's attributes."""

import ast
import re
from collections.abc import Iterator, Mapping
from copy import deepcopy
from textwrap import dedent

from .source_files import Definition, SourceFile
from .statements import Statement, attributes_called, statement_of


class Choice:
    """A choice between the statements of a forward.

    lines: lines of the source.
    required: fields of the config, with their values, that the choice depends on.
    absent: arguments that must be None.
    """

    def __init__(self, lines: list[str]):
        self.lines = lines
        self.required: dict[str, object] = {}
        self.absent: set[str] = set()

    def statements(self, body: list[ast.stmt], line: int, given: str | None = None) -> Iterator[Statement]:
        """Yield the statements that run.

        line: line before the first statement and its comments. given: an argument on which they depend.
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
        """Return a statement with its source, which begins after a line."""
        match node:
            case ast.AugAssign(ast.Name(name), ast.Mult(), factor):  # in place it would change other references, too
                return statement_of(f"{name} = {name} * {ast.unparse(factor)}", given)
        return statement_of(dedent("\n".join(self.lines[line : node.end_lineno])).strip("\n"), given)

    def given(self, node: ast.If) -> str | None:
        """Return the argument on which an `if` with a branch depends; None for another `if`."""
        return None

    def decide(self, node: ast.If) -> bool | None:
        """Tell whether the body of an `if` runs; None if not known."""
        return None

    def _is_cut(self, node: ast.If, runs: bool) -> bool:
        """Tell whether an open `elif` would be left without its `if`."""
        match node.orelse:
            case [ast.If() as following] if not runs:
                return self.decide(following) is None
        return False


class LayerChoice(Choice):
    """A choice by the public attributes of a layer; its methods may change private ones later.

    layer: the layer.
    stream: name of its stream, `[B, S, D]`.
    """

    def __init__(self, lines: list[str], layer: object, stream: str):
        super().__init__(lines)
        self.layer, self.stream = layer, stream

    def statement(self, node: ast.stmt, line: int, given: str | None) -> Statement:
        """Return a statement; an `if` whose body calls a missing attribute becomes empty."""
        statement = super().statement(node, line, given)
        calls = [ast.unparse(child.func) for child in ast.walk(node) if isinstance(child, ast.Call)]
        lacks_one = any(re.fullmatch(r"self\.\w+", name) and not hasattr(self.layer, name[5:]) for name in calls)
        if isinstance(statement.node, ast.If) and not statement.node.orelse and lacks_one:
            return statement._replace(node=ast.If(statement.node.test, [ast.Pass()], []))
        return statement

    def decide(self, node: ast.If) -> bool | None:
        """Tell whether the body of an `if` runs whose test compares constants and public attributes of the layer."""
        test = _OfThreeDimensions(self.stream).visit(deepcopy(node.test))
        for child in ast.walk(test):
            match child:
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


class _OfThreeDimensions(ast.NodeTransformer):
    """Replaces `stream.ndim` by 3."""

    def __init__(self, stream: str):
        self.stream = stream

    def visit_Attribute(self, node: ast.Attribute) -> ast.expr:
        return ast.Constant(3) if ast.unparse(node) == f"{self.stream}.ndim" else node


class ConfigChoice(Choice):
    """A choice by the settings of a config.

    owner, config: class of the forward, and class of its config; without them no field decides.
    optional: arguments of the forward with default None that are never reassigned.
    known: values of fields that are fixed.
    fields: the field behind an expression such as `self.use_parallel_residual`, and its value.
    always: attributes that every layer has. A branch by them alone of an optional argument runs where it is given; a
        branch by others is left out.
    tests: tests with a name.
    """

    def __init__(
        self,
        lines: list[str],
        optional: frozenset[str] = frozenset(),
        owner: Definition | None = None,
        config: Definition | None = None,
        known: Mapping[str, object] | None = None,
    ):
        super().__init__(lines)
        self.optional, self.config, self.known = optional, config, known or {}
        self.fields = {} if owner is None or config is None else _fields_of_layer(owner, config)
        self.always = frozenset() if owner is None else _modules_of_every_layer(owner)
        self.tests: dict[str, ast.expr] = {}

    def statements(self, body: list[ast.stmt], line: int, given: str | None = None) -> Iterator[Statement]:
        """Yield the statements that run, without the names of tests for a later `if`."""
        noted = _noted(body)
        self.tests |= noted
        for statement in super().statements(body, line, given):
            match statement.node:
                case ast.Assign([ast.Name(name)]) if name in noted:
                    continue
            yield statement

    def for_class(self, owner: Definition | None, file: SourceFile) -> "ConfigChoice":
        """Return the choice in a class that the layer uses, or in a function; it depends on the same fields."""
        choice = ConfigChoice(file.text.splitlines(), owner=owner, config=self.config, known=self.known)
        choice.required = self.required
        return choice

    def given(self, node: ast.If) -> str | None:
        """Return the argument in `if argument is not None`, where modules of every layer make the addition."""
        match self._reduced(node.test):
            case ast.Compare(ast.Name(name), [ast.IsNot()], [ast.Constant(None)]) if not node.orelse:
                called = {*attributes_called(node)}
                is_made_always = called and called <= self.always
                if name in self.optional and is_made_always and any(map(_adds, ast.walk(node))):
                    return name
        return None

    def _reduced(self, test: ast.expr) -> ast.expr:
        """Return a test without fields whose values are fixed."""
        match test:
            case ast.Name(name) if name in self.tests:
                return self._reduced(self.tests[name])
            case ast.BoolOp(ast.And(), operands):
                used: dict[str, object] = {}
                left = [operand for operand in operands if self._value(operand, used) is not True]
                return left[0] if len(left) == 1 and not used else test
        return test

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
        """Tell whether the test of an `if` holds; None if other values decide it.

        used: gets the fields that decide it, with their values.
        """
        match test:
            case ast.Name(name) if name in self.tests:
                return self._value(self.tests[name], used)
            case ast.Attribute() if (written := ast.unparse(test)) in self.fields:
                return bool(self._field(written, used))
            case ast.UnaryOp(ast.Not(), operand):
                value = self._value(operand, used)
                return None if value is None else not value
            case ast.BoolOp(operator, operands):
                decisive = isinstance(operator, ast.Or)  # one such value decides
                values = []
                for operand in operands:
                    values.append(self._value(operand, used))
                    if values[-1] is decisive:
                        return decisive
                return None if None in values else not decisive
            case ast.Compare(ast.Attribute() as left, [ast.Eq()], [ast.Constant(constant)]):
                if (written := ast.unparse(left)) in self.fields:
                    return self._field(written, used) == constant
        return None

    def _field(self, written: str, used: dict[str, object]) -> object:
        name, value = self.fields[written]
        if name in self.known:
            return self.known[name]
        used[name] = value
        return value


def _fields_of_layer(layer: Definition, config: Definition) -> dict[str, tuple[str, object]]:
    """Return the field behind each expression in a layer's `forward`, and its default."""
    defaults = config.constants()
    fields = {f"self.config.{name}": (name, value) for name, value in defaults.items()}
    init = layer.method("__init__")
    assignments = [node for node in ast.walk(init[0]) if isinstance(node, ast.Assign)] if init else []
    targets = [ast.unparse(target) for node in assignments for target in node.targets]
    for node in assignments:
        match node:
            case ast.Assign([ast.Attribute(ast.Name("self")) as target], ast.Attribute(ast.Name("config"), name)):
                written = ast.unparse(target)
                if name in defaults and targets.count(written) == 1:
                    fields[written] = (name, defaults[name])
    return fields


def _modules_of_every_layer(layer: Definition) -> frozenset[str]:
    """Return the attributes that the layer's `__init__` sets whatever its config says."""
    init = layer.method("__init__")
    body = init[0].body if init else []
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return frozenset(target.attr for target in targets if isinstance(target, ast.Attribute))


def _adds(node: ast.AST) -> bool:
    """Tell whether a node is `name = X + Y`, or replaces the stream by the result of a call on it."""
    match node:
        case ast.Assign([ast.Name()], ast.BinOp(op=ast.Add())):
            return True
        case ast.Assign([ast.Tuple([ast.Name(name), *_])], ast.Call(_, [ast.Name(given), *_])):
            return name == given
    return False


def _noted(body: list[ast.stmt]) -> dict[str, ast.expr]:
    """Return the test in each `name = X and Y` whose name only `if name:` reads."""
    tests: dict[str, ast.expr] = {}
    for node in body:
        match node:
            case ast.Assign([ast.Name(name)], ast.BoolOp() as test):
                others = [child for statement in body if statement is not node for child in ast.walk(statement)]
                uses = [child for child in others if isinstance(child, ast.Name) and child.id == name]
                if all(any(isinstance(child, ast.If) and child.test is use for child in others) for use in uses):
                    tests[name] = test
    return tests
