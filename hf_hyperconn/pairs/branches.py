"""The two branches of a decoder layer, cut from the source of its `forward`.

A branch is what stands between `residual = hidden_states` and `hidden_states = residual + ...`.
"""

import ast
import builtins
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from textwrap import dedent

from ..errors import UnsupportedCheckpointError

USUAL_ATTENTION = "hidden_states = self.input_layernorm(hidden_states)"
USUAL_MLP = "hidden_states = self.post_attention_layernorm(hidden_states)\nhidden_states = self.mlp(hidden_states)"


@dataclass(frozen=True)
class Branch:
    """One branch, as a method of its layer.

    arguments: the names and defaults it takes besides `hidden_states`, as they are written in a signature.
    statements: its lines up to the addition, with their comments.
    result: the expression that was added.
    names: what it reads that is neither its own nor the layer's: globals of the layer's module.
    has_usual_statements: whether those are a norm, and attention or an MLP.
    """

    arguments: tuple[str, ...]
    statements: str
    result: str
    names: frozenset[str]
    has_usual_statements: bool

    @property
    def is_usual(self) -> bool:
        """Whether it is norm + attention or norm + MLP, as `HyperConnectionDecoderLayer` has it."""
        return self.has_usual_statements and self.result == "hidden_states"

    def method(self, name: str, docstring: str = "") -> str:
        """The source of a method, indented as at the top of a module."""
        head = f"def {name}({', '.join(('self', 'hidden_states', *self.arguments))}):"
        if len(head) > 100:
            lines = "".join(f"    {argument},\n" for argument in ("self", "hidden_states", *self.arguments))
            head = f"def {name}(\n{lines}):"
        body = [*([f'"""{docstring}"""'] if docstring else []), *self.statements.splitlines(), f"return {self.result}"]
        return "\n".join([head, *(f"    {line}".rstrip() for line in body)]) + "\n"


def cut_branches(forward: ast.FunctionDef, source: str, layer: str) -> tuple[Branch, Branch]:
    """The attention branch and the MLP branch of a decoder layer's `forward`.

    source: in which the positions of `forward` are; layer: the name of its class.

    Raises `UnsupportedCheckpointError` when it is not two times `residual = hidden_states`, a branch that does not
    touch `residual`, and `hidden_states = residual + ...`, and then `return hidden_states`.
    """
    body = [node for node in forward.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    starts = [i for i, node in enumerate(body) if ast.unparse(node) == "residual = hidden_states"]
    if [argument.arg for argument in forward.args.args[:2]] != ["self", "hidden_states"]:
        raise refusal(layer)
    if len(starts) != 2 or starts[0] != 0 or ast.unparse(body[-1]) != "return hidden_states":
        raise refusal(layer)
    cut = []
    for start, end in pairwise([*starts, len(body) - 1]):
        *statements, addition = body[start + 1 : end]
        result = _added(addition, layer)
        nodes = [node for statement in (*statements, result) for node in ast.walk(statement)]
        if any(isinstance(node, ast.Name) and node.id in ("residual", "super", "__class__") for node in nodes):
            raise refusal(layer)
        lines = source.splitlines()[body[start].end_lineno : statements[-1].end_lineno if statements else 0]
        cut.append((statements, dedent("\n".join(lines)).strip("\n"), ast.get_source_segment(source, result), nodes))
    (first, *first_text, first_nodes), (second, *second_text, second_nodes) = cut
    arguments = {argument.arg for argument in ast.walk(forward.args) if isinstance(argument, ast.arg)}
    if (_read(second_nodes) - {"self", "hidden_states"}) & (arguments | _made(first_nodes)):
        raise refusal(layer)
    signature, defaults = _signature(forward.args)
    is_usual = _is_usual_attention(first, forward.args), "\n".join(map(ast.unparse, second)) == USUAL_MLP
    return (
        Branch(signature, *first_text, _globals([*first_nodes, *defaults], arguments), is_usual[0]),
        Branch(("**kwargs",), *second_text, _globals(second_nodes, {"self", "hidden_states"}), is_usual[1]),
    )


def check_layer_loop(forward: ast.FunctionDef, model: str) -> None:
    """Make sure that a base model only passes the stream from layer to layer.

    model: the name of its class.

    Raises `UnsupportedCheckpointError` when the loop over the layers in its forward skips some, or uses the stream.
    """
    loops = [
        node for node in ast.walk(forward) if isinstance(node, ast.For) and "self.layers" in ast.unparse(node.iter)
    ]
    for loop in loops:
        uses = [statement for statement in loop.body if "hidden_states" in ast.unparse(statement)]
        jumps = any(isinstance(node, ast.Continue | ast.Break) for node in ast.walk(loop))
        if len(uses) == 1 and not jumps and _is_layer_call(uses[0], ast.unparse(loop.target)):
            return
    raise UnsupportedCheckpointError(
        f"the forward of {model} does more with the residual stream than to pass it from layer to layer, so its "
        f"layers can't hand on several."
    )


def digest(forward: str) -> str:
    """A short digest of the source of a `forward`, whatever stands above its `def` and however it is spaced."""
    text = " ".join(forward[forward.index("def forward") :].split())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def refusal(layer: str) -> UnsupportedCheckpointError:
    """What to raise for a layer of another form."""
    return UnsupportedCheckpointError(
        f"the forward of {layer} is not two branches, each added to the residual stream, so hyper-connections can't "
        f"stand for its additions."
    )


def _is_layer_call(statement: ast.stmt, loop_variables: str) -> bool:
    """Whether it is `hidden_states = layer(hidden_states, name=...)`."""
    match statement:
        case ast.Assign(
            targets=[ast.Name("hidden_states")],
            value=ast.Call(ast.Name(layer), [ast.Name("hidden_states"), *others], keywords),
        ):
            rest = [ast.unparse(node) for node in (*others, *keywords)]
            return layer in loop_variables and not any("hidden_states" in argument for argument in rest)
    return False


def _added(statement: ast.stmt, layer: str) -> ast.expr:
    """X of `hidden_states = residual + X`."""
    match statement:
        case ast.Assign(
            targets=[ast.Name("hidden_states")], value=ast.BinOp(ast.Name("residual"), ast.Add(), branch_output)
        ):
            return branch_output
    raise refusal(layer)


def _signature(arguments: ast.arguments) -> tuple[tuple[str, ...], list[ast.expr]]:
    """What stands after `self, hidden_states` in a signature, without annotations, and the nodes of its defaults."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    written = [_parameter(argument.arg, default) for argument, default in zip(positional, defaults, strict=True)][2:]
    if arguments.vararg or arguments.kwonlyargs:
        written.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    written += [_parameter(argument.arg, default) for argument, default in pairs]
    if arguments.kwarg:
        written.append(f"**{arguments.kwarg.arg}")
    nodes = [node for default in (*defaults, *arguments.kw_defaults) if default for node in ast.walk(default)]
    return tuple(written), nodes


def _parameter(name: str, default: ast.expr | None) -> str:
    return name if default is None else f"{name}={ast.unparse(default)}"


def _is_usual_attention(statements: list[ast.stmt], arguments: ast.arguments) -> bool:
    """Whether it is norm and attention, which is given each argument of the layer under the same name."""
    *before, call = statements
    match call:
        case ast.Assign(targets=[target], value=ast.Call(function, [], keywords)):
            taken = {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)} - {"self"}
            named = {keyword.arg: ast.unparse(keyword.value) for keyword in keywords}
            others = named.pop(None, None)
            return (
                [ast.unparse(statement) for statement in before] == [USUAL_ATTENTION]
                and ast.unparse(target) == "(hidden_states, _)"
                and ast.unparse(function) == "self.self_attn"
                and named == {name: name for name in taken}
                and arguments.kwarg is not None
                and others == arguments.kwarg.arg
            )
    return False


def _names(nodes: list[ast.AST]) -> Iterator[ast.Name]:
    return (node for node in nodes if isinstance(node, ast.Name))


def _made(nodes: list[ast.AST]) -> set[str]:
    return {name.id for name in _names(nodes) if isinstance(name.ctx, ast.Store)}


def _read(nodes: list[ast.AST]) -> set[str]:
    return {name.id for name in _names(nodes)} - _made(nodes)


def _globals(nodes: list[ast.AST], own: set[str]) -> frozenset[str]:
    return frozenset(_read(nodes) - own - vars(builtins).keys())
