"""The loop in which a model runs its decoder layers, read from the source of its `forward`."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from ...errors import UnsupportedCheckpointError
from .source_files import Definition
from .statements import changes_in_place, names, read_names

CHECKPOINTING = "self._gradient_checkpointing_func"  # of diffusers


@dataclass(frozen=True)
class LayerLoop:
    """The loop in which a model runs its layers.

    positional: number of arguments by their place after the stream; all of them with diffusers' gradient
        checkpointing.
    takes_first: whether a layer returns a tuple, with the stream first.
    between: the model's method that may change the stream after a layer; None without one.
    layerdrop: the attribute with the rate at which training leaves layers out; None without one.
    """

    positional: int
    takes_first: bool
    between: str | None
    layerdrop: str | None = None


def read_layer_loop(
    forward: ast.FunctionDef, model: str, layers: str = "layers", owner: Definition | None = None
) -> LayerLoop:
    """Read how a model passes the stream from layer to layer.

    forward: forward of the module with the layers.
    model: name of its class.
    layers: attribute of the layers.
    owner: its class, whose methods may choose the tokens to continue with.

    Raises `UnsupportedCheckpointError` when the loop over the layers skips some, or uses the stream otherwise.
    """
    for loop in _only_loop(forward, f"self.{layers}"):
        layerdrop = _layerdrop(loop)
        body = [*_without_layerdrop(loop.body, layerdrop)] if layerdrop else loop.body
        if any(isinstance(node, ast.Continue | ast.Break) for statement in body for node in ast.walk(statement)):
            continue
        whole, checkpointed = zip(*map(_without_checkpointing, body), strict=True)
        body = [*whole]
        target = ast.unparse(loop.target)
        calls = [*filter(None, (_layer_call(statement, target) for statement in body))]
        if len(calls) != 1:
            continue
        ((call, stream, positional),) = calls
        positional = max(positional, *checkpointed)
        records = f"if output_hidden_states:\n    all_hidden_states = all_hidden_states + ({stream},)"
        uses = [node for node in body if stream in {name.id for name in names(node)}]
        others = [node for node in uses if node is not call and ast.unparse(node) != records]
        others = [node for node in others if owner is None or not _only_chooses_tokens(node, stream, owner)]
        between = _called_between(others[-1], stream) if others else None
        match others[:-1] if between else others:
            case []:
                taken = ast.unparse(call.targets[0])
            case [ast.Assign(targets=[ast.Name(name)], value=value)] if name == stream:
                taken = ast.unparse(value).replace(ast.unparse(call.targets[0]), stream)
            case _:
                continue
        if taken in (stream, f"{stream}[0] if isinstance({stream}, tuple) else {stream}"):
            return LayerLoop(positional, takes_first=False, between=between, layerdrop=layerdrop)
        if taken == f"{stream}[0]" or taken.startswith(f"({stream}, "):
            return LayerLoop(positional, takes_first=True, between=between, layerdrop=layerdrop)
    raise UnsupportedCheckpointError(
        f"the forward of {model} does more with the residual stream than to pass it from layer to layer, so its "
        f"layers can't hand on several."
    )


def _only_loop(forward: ast.FunctionDef, layers: str) -> list[ast.For]:
    """Return the loop over all layers in their order; none if layers may run elsewhere, too."""
    loops = [node for node in ast.walk(forward) if isinstance(node, ast.For) and _are_all(node.iter, layers)]
    uses = sum(isinstance(node, ast.Attribute) and ast.unparse(node) == layers for node in ast.walk(forward))
    harmless = sum(_runs_none(node, layers) for node in ast.walk(forward))
    return loops if len(loops) == 1 == uses - harmless else []


def _are_all(iterated: ast.expr, layers: str) -> bool:
    """Tell whether it is `self.layers` or `self.layers[: self.config.number]`, also in `enumerate` or `zip`."""
    match iterated:
        case ast.Call(ast.Name("enumerate" | "zip"), [first, *_]):
            return _are_all(first, layers)
    return re.fullmatch(rf"{re.escape(layers)}(\[:self\.config\.\w+\])?", ast.unparse(iterated)) is not None


def _runs_none(node: ast.AST, layers: str) -> bool:
    """Tell whether a node is `len(self.layers)`, or an attribute of one layer."""
    match node:
        case ast.Call(ast.Name("len"), [of]):
            return ast.unparse(of) == layers
        case ast.Attribute(ast.Subscript(of), name) if name not in ("forward", "__call__"):
            return ast.unparse(of) == layers
    return False


def _layerdrop(loop: ast.For) -> str | None:
    """Return the attribute in a test that leaves a layer out; None without one."""
    for node in ast.walk(loop):
        match node:
            case ast.Compare(_, [ast.Lt()], [ast.Attribute(ast.Name("self"), name)]):
                return name
    return None


def _without_layerdrop(body: list[ast.stmt], layerdrop: str) -> Iterator[ast.stmt]:
    """Yield the statements that run while the rate of LayerDrop is 0."""
    false = set()
    for node in body:
        match node:
            case ast.Assign([ast.Name(name)], ast.Constant(False)):
                false.add(name)
            case ast.If(ast.UnaryOp(ast.Not(), ast.Name(name)), statements, []) if name in false:
                yield from statements
            case ast.If(ast.BoolOp(ast.And(), tests), _, []) if any(_needs(test, layerdrop) for test in tests):
                pass
            case _:
                yield node


def _needs(test: ast.expr, layerdrop: str) -> bool:
    """Tell whether a test is `self.layerdrop > 0.0` or `... < self.layerdrop`."""
    written = f"self.{layerdrop}"
    match test:
        case ast.Compare(left, [ast.Gt()], [ast.Constant(0.0)]):
            return ast.unparse(left) == written
        case ast.Compare(_, [ast.Lt()], [right]):
            return ast.unparse(right) == written
    return False


def _called_between(statement: ast.stmt, stream: str) -> str | None:
    """Return the method in `if ...: stream = self.method(stream, ...)`; None for another statement."""
    match statement:
        case ast.If(
            test,
            [ast.Assign([ast.Name(target)], ast.Call(ast.Attribute(ast.Name("self"), method), [first, *others], []))],
        ) if target == stream == ast.unparse(first):
            return None if stream in read_names(test, *others) else method
    return None


def _only_chooses_tokens(statement: ast.stmt, stream: str, owner: Definition) -> bool:
    """Tell whether a statement is `if ...: stream, ... = self.method(stream, ...)`, which selects tokens.

    `stream[:, chosen, :]` does the same to several streams, `[B, S, N, D]`, as to one.
    """
    match statement:
        case ast.If(
            test,
            [ast.Assign([ast.Tuple([ast.Name(kept), *_])], ast.Call(ast.Attribute(ast.Name("self"), name), values))],
            [],
        ) if kept == stream == ast.unparse(values[0]) and stream not in read_names(test):
            method = owner.method(name)
            return method is not None and _slices_first(method[0])
    return False


def _slices_first(method: ast.FunctionDef) -> bool:
    """Tell whether a method returns its first argument, or a slice of the argument's second dimension."""
    given, slices = method.args.args[1].arg, set()
    for node in ast.walk(method):
        match node:
            case ast.Assign([ast.Name(name) as target], value) if name == given:
                if re.fullmatch(rf"{given}\[:, \w+, :\]", ast.unparse(value)) is not None:
                    slices.add(target)
            case ast.Return(value):
                if not isinstance(value, ast.Tuple) or ast.unparse(value.elts[0]) != given:
                    return False
    stored = {node for node in names(method) if node.id == given and isinstance(node.ctx, ast.Store)}
    return stored == slices and not changes_in_place(method, {given})


def _without_checkpointing(statement: ast.stmt) -> tuple[ast.stmt, int]:
    """Return the second of `if ...: x = self._gradient_checkpointing_func(layer, x, ...) else: x = layer(x, ...)`.

    It returns also the number of further arguments in the first; 0 for any other statement.
    """
    match statement:
        case ast.If(
            body=[ast.Assign([result], ast.Call(function, [ast.Name(layer), ast.Name(stream), *others], []))],
            orelse=[ast.Assign([also], ast.Call(ast.Name(called), [ast.Name(given), *_])) as plain],
        ) if ast.unparse(function) == CHECKPOINTING and ast.unparse(result) == ast.unparse(also):
            if (layer, stream) == (called, given) and stream not in read_names(*others):
                return plain, len(others)
    return statement, 0


def _layer_call(statement: ast.stmt, loop_variables: str) -> tuple[ast.Assign, str, int] | None:
    """Return `result = layer(stream, ..., name=...)`, the stream, and the number of other positional arguments."""
    match statement:
        case ast.Assign(targets=[_], value=ast.Call(ast.Name(layer), [ast.Name(stream), *others], keywords)) if (
            layer in loop_variables
        ):
            has_star = any(isinstance(argument, ast.Starred) for argument in others)
            if stream not in read_names(*others, *keywords) and not has_star:
                return statement, stream, len(others)
    return None
