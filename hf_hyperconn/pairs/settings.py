"""The settings on which the form of a decoder layer depends: its source, as it runs with those of most checkpoints."""

import ast
from collections.abc import Iterator, Mapping
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


@dataclass
class Settled:
    """A choice between the statements of a forward.

    fields: the field of the config behind an expression, as `self.use_parallel_residual`, and the value to take.
    optional: arguments of the forward that are None unless they are given, and stay what they are.
    required: the value of each field that the choice rests on.
    absent: the arguments that it takes as not given.
    """

    fields: Mapping[str, tuple[str, object]]
    optional: frozenset[str]
    required: dict[str, object] = field(default_factory=dict)
    absent: set[str] = field(default_factory=set)

    def statements(self, body: list[ast.stmt], line: int) -> Iterator[tuple[int, ast.stmt]]:
        """The statements that run, each with the line that its own, comments above it included, come after.

        line: that of the first of them.
        """
        for node in body:
            if isinstance(node, ast.If) and (runs := self._decide(node)) is not None:
                chosen = node.body if runs else node.orelse
                if chosen:
                    before = node.test.end_lineno if runs else chosen[0].lineno - 1
                    yield from self.statements(chosen, before or line)
            else:
                yield line, node
            line = node.end_lineno or line

    def _decide(self, node: ast.If) -> bool | None:
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


def _adds(node: ast.AST) -> bool:
    """Whether it is `name = X + Y`."""
    match node:
        case ast.Assign([ast.Name()], ast.BinOp(op=ast.Add())):
            return True
    return False
