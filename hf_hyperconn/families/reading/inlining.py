"""Additions within a module of a layer, a method or a function: their statements replace the call.

`output` in `x = self.output(x, stream)` may add to its second argument. Then the statements of its `forward` stand
there, with `self.output` for `self` and an assignment for each argument with another name.

Hooks of `output_attentions=True` record the results of calls, so these recorders move. T5's `T5LayerSelfAttention`
adds to the stream, and its inner `T5Attention` returns the same weights.
"""

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from .choices import ConfigChoice
from .source_files import Definition, FunctionSource, SourceFile
from .statements import Statement, added_to, assigned_names, is_copy, names, read_names, returned_at_once, statement_of


@dataclass(frozen=True)
class Callee:
    """A called function or method.

    node: its definition.
    body: its statements, without the docstring.
    arguments: its parameters, without `self`.
    file: its file.
    owner: its class; None for a function.
    path: path of `self` from the layer; None for a function.
    """

    node: ast.FunctionDef
    body: list[ast.stmt]
    arguments: ast.arguments
    file: SourceFile
    owner: Definition | None
    path: str | None

    @property
    def source(self) -> FunctionSource:
        """Return the function as the source of its statements."""
        return FunctionSource.of(self.node, self.owner.file if self.owner else self.file, self.owner)


@dataclass
class Inliner:
    """Replaces calls in a layer's forward by the statements of their callees.

    layer: class of the layer.
    choice: the choice between its statements.
    inlined: classes of modules whose statements it has inserted.
    sources: functions whose statements it has inserted.
    """

    layer: Definition
    choice: ConfigChoice
    inlined: list[Definition] = field(default_factory=list)
    sources: list[FunctionSource] = field(default_factory=list)

    def expanded(self, statement: Statement, streams: set[str]) -> list[Statement] | None:
        """Return the statements that replace a call that adds to the stream; None for another statement."""
        match statement.node:
            case ast.Assign([target], ast.Call(ast.Name("apply_chunking_to_forward"), [function, _, _, given], [])):
                call = ast.Call(function, [given], [])
                self.choice.required["chunk_size_feed_forward"] = 0  # with which nothing is cut into chunks
            case ast.Assign([target], ast.Call() as call):
                pass
            case _:
                return None
        values = [*call.args, *(keyword.value for keyword in call.keywords)]
        if not any(isinstance(value, ast.Name) and value.id in streams for value in values):
            return None
        callee = self._callee(call.func)
        if callee is None or (bound := _bound(call, callee.arguments)) is None:
            return None
        of_stream = {name for name, value in bound.items() if isinstance(value, ast.Name) and value.id in streams}
        body = _with_last_in_return([*self._statements(callee)])
        if not body or not self._adds(body[:-1], of_stream):
            return None
        if (arguments := _assignments(bound, of_stream, body)) is None or (ends := _ends(target, body)) is None:
            return None
        self.sources.append(callee.source)
        if callee.owner is not None and callee.path == ast.unparse(call.func):
            self.inlined.append(callee.owner)
        before, after = ends
        *others, last = body[:-1]
        texts = [*arguments, *(other.text for other in others), *before, last.text, *after]
        return [statement_of(text, statement.given) for text in texts]

    def _statements(self, callee: Callee) -> Iterator[Statement]:
        choice = self.choice.for_class(callee.owner, callee.file)
        for statement in choice.statements(callee.body, callee.body[0].lineno - 1):
            text = statement.text
            if callee.path not in (None, "self"):
                text = re.sub(r"(?<![\w.])self\b", callee.path, text)
            yield statement_of(text, statement.given)

    def _adds(self, body: list[Statement], streams: set[str]) -> bool:
        """Tell whether a callee adds something to its stream."""
        streams = set(streams)
        for statement in body:
            node = statement.node
            if added_to(node, streams) is not None or self.expanded(statement, streams) is not None:
                return True
            if is_copy(node, streams):
                streams.add(node.targets[0].id)
            else:
                streams -= assigned_names(node)
        return False

    def _callee(self, function: ast.expr) -> Callee | None:
        if isinstance(function, ast.Name):
            node = self.layer.file.function(function.id)
            return None if node is None else _callee_of(node, node.args.args, self.layer.file, None, None)
        if not ast.unparse(function).startswith("self."):
            return None
        if (module := self._module(function)) is not None and (forward := module.method("forward")) is not None:
            node, file = forward
            return _callee_of(node, node.args.args[1:], file, module, ast.unparse(function))
        match function:
            case ast.Attribute(value, name) if (owner := self._module(value)) is not None:
                if (method := owner.method(name)) is not None:
                    node, file = method
                    return _callee_of(node, node.args.args[1:], file, owner, ast.unparse(value))
        return None

    def _module(self, path: ast.expr) -> Definition | None:
        """Return the class of `self`, `self.name`, `self.name.name` or `self.names[i]`; None if not known."""
        match path:
            case ast.Name("self"):
                return self.layer
            case ast.Attribute(value, name) if (owner := self._module(value)) is not None:
                return next(assigned_classes(owner, name), None)
            case ast.Subscript(ast.Attribute(value, name), index) if (owner := self._module(value)) is not None:
                classes = [*self._appended(owner, name)]
                place = ast.literal_eval(index) if isinstance(index, ast.Constant | ast.UnaryOp) else len(classes)
                return classes[place] if -len(classes) <= place < len(classes) else None
        return None

    def _appended(self, owner: Definition, name: str) -> Iterator[Definition]:
        """Yield the classes of the modules that an `__init__` appends to a list."""
        if (init := owner.method("__init__")) is None:
            return
        node, file = init
        for statement in self.choice.for_class(owner, file).statements(node.body, node.body[0].lineno - 1):
            match statement.node:
                case ast.Expr(ast.Call(function, [ast.Call(ast.Name(layer))])):
                    appended = file.find(layer) if ast.unparse(function) == f"self.{name}.append" else None
                    if appended is not None:
                        yield appended


def _callee_of(
    node: ast.FunctionDef,
    arguments: list[ast.arg],
    file: SourceFile,
    owner: Definition | None,
    path: str | None,
) -> Callee:
    has_docstring = isinstance(node.body[0], ast.Expr) and isinstance(node.body[0].value, ast.Constant)
    taken = ast.arguments(
        [], arguments, None, node.args.kwonlyargs, node.args.kw_defaults, node.args.kwarg, node.args.defaults
    )
    return Callee(node, node.body[1:] if has_docstring else node.body, taken, file, owner, path)


def assigned_classes(owner: Definition, name: str) -> Iterator[Definition]:
    """Yield the class in each `self.name = Class(...)` of an `__init__`."""
    if (init := owner.method("__init__")) is None:
        return
    for node in ast.walk(init[0]):
        match node:
            case ast.Assign([ast.Attribute(ast.Name("self"), attribute)], ast.Call(ast.Name(class_name))):
                if attribute == name and (definition := init[1].find(class_name)) is not None:
                    yield definition


def _bound(call: ast.Call, arguments: ast.arguments) -> dict[str, ast.expr] | None:
    """Return the value of each argument in a call; None for other arguments, or unknown ones."""
    if any(isinstance(value, ast.Starred) for value in call.args) or len(call.args) > len(arguments.args):
        return None
    taken = [argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)]
    defaults = [*[None] * (len(arguments.args) - len(arguments.defaults)), *arguments.defaults, *arguments.kw_defaults]
    bound = {name: default for name, default in zip(taken, defaults, strict=True) if default is not None}
    bound |= dict(zip(taken, call.args, strict=False))
    for keyword in call.keywords:
        if keyword.arg is None:  # **kwargs
            if arguments.kwarg is None or ast.unparse(keyword.value) != arguments.kwarg.arg:
                return None
        elif keyword.arg not in taken:
            return None
        else:
            bound[keyword.arg] = keyword.value
    return bound if bound.keys() >= set(taken) else None


def _assignments(bound: dict[str, ast.expr], streams: set[str], body: list[Statement]) -> list[str] | None:
    """Return an assignment for each argument with another name; None when one would overwrite another."""
    nodes = [statement.node for statement in body]
    used = {name for node in nodes for name in read_names(node)}
    used |= {name for node in nodes if isinstance(node, ast.AugAssign) for name in assigned_names(node)}
    ordered = sorted(bound, key=lambda name: name not in streams)
    assignments: list[str] = []
    spoilt: set[str] = set()
    for name in ordered:
        if ast.unparse(bound[name]) == name or (name not in used and name not in streams):
            continue
        if spoilt & read_names(bound[name]):
            return None
        assignments.append(f"{name} = {ast.unparse(bound[name])}")
        spoilt.add(name)
    return assignments


def _with_last_in_return(body: list[Statement]) -> list[Statement]:
    """Return the statements of a callee, with a tuple that is returned at once in the `return`."""
    match returned_at_once(body[-1].node, body[-2].node) if len(body) > 1 else None:
        case ast.Return(ast.BinOp(ast.Tuple(), ast.Add())) as whole:
            return [*body[:-2], statement_of(ast.unparse(whole), body[-1].given)]
    return body


def _are_unused(targets: list[ast.expr]) -> bool:
    return all(isinstance(target, ast.Name) and target.id == "_" for target in targets)


def _ends(target: ast.expr, body: list[Statement]) -> tuple[list[str], list[str]] | None:
    """Return the assignments of a callee's results before its last statement and after it; None for other results."""
    if len(body) < 2 or not isinstance(body[-1].node, ast.Return) or body[-1].node.value is None:
        return None
    value = body[-1].node.value
    match target, value:
        case ast.Tuple(targets), ast.Tuple(values) if len(targets) == len(values):
            pairs = [*zip(targets, values, strict=True)]
        case ast.Tuple([first, *others]), ast.BinOp(ast.Tuple([result]), ast.Add()) if _are_unused(others):
            pairs = [(first, result)]
        case ast.Name(), ast.Name() | ast.BinOp():
            pairs = [(target, value)]
        case _:
            return None
    if not all(isinstance(assigned, ast.Name) for assigned, _ in pairs):
        return None
    by_last = assigned_names(body[-2].node)
    before: list[str] = []
    after: list[str] = []
    for assigned, result in pairs:
        name = ast.unparse(assigned)
        if name in ("_", ast.unparse(result)):
            continue
        is_after = by_last & {name.id for name in names(result)}
        (after if is_after else before).append(f"{name} = {ast.unparse(result)}")
    return before, after


class Recorder(NamedTuple):
    """The place of an output: a class of modules, the place in their results, and their attribute."""

    owner: str
    place: int
    attribute: str


def moved_recorders(base: Definition, inlined: Iterable[Definition]) -> dict[str, Recorder]:
    """Return the moved recorders of a model, by the key of their output.

    inlined: classes of modules whose statements are in branches.
    """
    modules = {module.name: module for module in inlined}
    return {
        key: recorder
        for key, name, place in _recorders(base)
        if name in modules
        for recorder in _same_inside(modules[name], place)
    }


def _recorders(base: Definition) -> Iterator[tuple[str, str, int]]:
    """Yield the key of each recorded output, the class of its modules and the place in their results."""
    recorders = base.dict_of("_can_record_outputs")
    for key, value in zip(recorders.keys, recorders.values, strict=True):
        match key, value:
            case (
                ast.Constant(str(what)),
                ast.Call(ast.Name(), [ast.Name(name)], [ast.keyword("index", index)]),
            ):
                yield what, name, ast.literal_eval(index)


def _same_inside(definition: Definition, place: int) -> Iterator[Recorder]:
    """Yield the recorder of the inner module that makes a module's result at a place."""
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
