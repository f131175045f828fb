"""The settings on which the form of a decoder layer depends: its source, as it runs with those of most checkpoints."""

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from .source_files import Definition, SourceFile
from .statements import Choice, Statement, attributes_called


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


def modules_of_every_layer(layer: Definition) -> frozenset[str]:
    """The attributes that the layer's `__init__` sets whatever its config says."""
    init = layer.method("__init__")
    body = init[0].body if init else []
    targets = [target for node in body if isinstance(node, ast.Assign) for target in node.targets]
    return frozenset(target.attr for target in targets if isinstance(target, ast.Attribute))


def settled_by(
    layer: Definition, config: Definition, lines: list[str], known: Mapping[str, object], optional: frozenset[str]
) -> "Settled":
    """The choice between the statements of a layer's forward, by the fields of its config."""
    fields, always = fields_of_layer(layer, config), modules_of_every_layer(layer)
    return Settled(lines, fields, optional, always, known=known, config=config)


@dataclass
class Settled(Choice):
    """A choice by the settings of a config.

    lines: of the source that it is from.
    fields: the field of the config behind an expression, as `self.use_parallel_residual`, and the value to take.
    optional: arguments of the forward that are None unless they are given, and stay what they are.
    always: attributes that every layer has. What is added of an optional argument by these is added where it is given;
        what needs another is left out.
    required: the value of each field that the choice rests on.
    absent: the arguments that it takes as not given.
    known: fields of the config that have these values in any case.
    config: where the defaults of fields are from.
    tests: those that are noted under a name.
    """

    lines: list[str]
    fields: Mapping[str, tuple[str, object]] = field(default_factory=dict)
    optional: frozenset[str] = frozenset()
    always: frozenset[str] = frozenset()
    required: dict[str, object] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)
    known: Mapping[str, object] = field(default_factory=dict)
    config: Definition | None = None
    tests: dict[str, ast.expr] = field(default_factory=dict)

    def statements(self, body: list[ast.stmt], line: int, given: str | None = None) -> Iterator[Statement]:
        """The statements that run; not those that only note the test of a later `if`."""
        noted = _noted(body)
        self.tests |= noted
        for each in super().statements(body, line, given):
            match each.node:
                case ast.Assign([ast.Name(name)]) if name in noted:
                    continue
            yield each

    def for_class(self, owner: Definition | None, file: SourceFile) -> "Settled":
        """The choice between the statements of a class that the layer uses, or of a function; it rests on the same."""
        fields = {} if owner is None or self.config is None else fields_of_layer(owner, self.config)
        return Settled(file.text.splitlines(), fields, required=self.required, known=self.known, config=self.config)

    def given(self, node: ast.If) -> str | None:
        """The argument in `if argument is not None`, where what that adds is made by modules of every layer."""
        match self._reduced(node.test):
            case ast.Compare(ast.Name(name), [ast.IsNot()], [ast.Constant(None)]) if not node.orelse:
                called = {*attributes_called(ast.walk(node))}
                is_made_always = called and called <= self.always
                if name in self.optional and is_made_always and any(map(_adds, ast.walk(node))):
                    return name
        return None

    def _reduced(self, test: ast.expr) -> ast.expr:
        """What is left of a test besides fields that are known in any case."""
        match test:
            case ast.Name(name) if name in self.tests:
                return self._reduced(self.tests[name])
            case ast.BoolOp(ast.And(), operands):
                used: dict[str, object] = {}
                left = [each for each in operands if self._value(each, used) is not True]
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
        """Whether the test of an `if` holds; None when that is not for these fields to say."""
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
                    of_operand: dict[str, object] = {}
                    values.append(self._value(operand, of_operand))
                    if values[-1] is decisive:
                        used |= of_operand
                        return decisive
                    used |= of_operand
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


def _adds(node: ast.AST) -> bool:
    """Whether it is `name = X + Y`, or makes the stream anew by a call that is given it."""
    match node:
        case ast.Assign([ast.Name()], ast.BinOp(op=ast.Add())):
            return True
        case ast.Assign([ast.Tuple([ast.Name(name), *_])], ast.Call(_, [ast.Name(given), *_])):
            return name == given
    return False


def _noted(body: list[ast.stmt]) -> dict[str, ast.expr]:
    """The test in each `name = X and Y` that is read in nothing but `if name:`."""
    found: dict[str, ast.expr] = {}
    for node in body:
        match node:
            case ast.Assign([ast.Name(name)], ast.BoolOp() as test):
                others = [each for statement in body if statement is not node for each in ast.walk(statement)]
                uses = [each for each in others if isinstance(each, ast.Name) and each.id == name]
                if all(any(isinstance(each, ast.If) and each.test is use for each in others) for use in uses):
                    found[name] = test
    return found
