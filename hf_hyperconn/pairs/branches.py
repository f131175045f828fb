"""The branches of a decoder layer, cut from the source of its `forward`.

A branch is what the layer computes from the residual stream before it adds that to the stream: of

    residual = hidden_states
    hidden_states = self.mlp(self.norm(hidden_states))
    hidden_states = residual + hidden_states

the second line. The stream is followed by name: what is given to the layer, its copies, and every sum.
"""

import ast
import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from textwrap import dedent

from ..errors import UnsupportedCheckpointError
from ..models.sub_layers import SUB_LAYERS, SubLayer
from .names import global_names, made, read, read_before_made
from .settings import OfLayer, Settled

USUAL_ATTENTION = "hidden_states = self.input_layernorm(hidden_states)"
USUAL_MLP = "hidden_states = self.post_attention_layernorm(hidden_states)\nhidden_states = self.mlp(hidden_states)"
ASIDE = (
    "norm",
    "dropout",
    "drop_path",
    "act",
    "layer_scale",
    "ln_",
)  # in the names of modules that a branch isn't named after


@dataclass(frozen=True)
class Branch:
    """One branch, as a method of its layer.

    stream: the name by which it reads the residual stream.
    arguments: the names and defaults it takes besides that, as they are written in a signature.
    statements: its lines up to the addition, with their comments.
    result: the expression that was added.
    returned: the names it makes that the layer returns besides the stream, or that later branches read.
    names: what it reads that is neither its own nor the layer's: globals of the layer's module.
    modules: the attributes of the layer that it calls.
    has_usual_statements: whether those are a norm, and attention or an MLP.
    """

    stream: str
    arguments: tuple[str, ...]
    statements: str
    result: str
    returned: tuple[str, ...]
    names: frozenset[str]
    modules: tuple[str, ...]
    has_usual_statements: bool

    @property
    def is_usual(self) -> bool:
        """Whether it is norm + attention or norm + MLP, as `HyperConnectionDecoderLayer` has it."""
        return self.has_usual_statements and self.result == "hidden_states" and not self.returned

    def method(self, name: str, docstring: str = "") -> str:
        """The source of a method, indented as at the top of a module."""
        taken = ("self", self.stream, *self.arguments)
        head = f"def {name}({', '.join(taken)}):"
        if len(head) > 100:
            lines = "".join(f"    {argument},\n" for argument in taken)
            head = f"def {name}(\n{lines}):"
        also = ", ".join(f'"{each}": {each}' for each in self.returned)
        result = f"return {self.result}, {{{also}}}" if also else f"return {self.result}"
        body = [*([f'"""{docstring}"""'] if docstring else []), *self.statements.splitlines(), result]
        return "\n".join([head, *(f"    {line}".rstrip() for line in body)]) + "\n"


@dataclass(frozen=True)
class Cut:
    """The branches of a layer, in the order in which they are added.

    widened: the attribute of the layer that says whether the stream is made float32 first; None where none does.
    returned: what the layer returns after the stream.
    settings: the value of each field of the config with which a layer has these branches.
    absent: arguments of the layer that must be None.
    """

    branches: tuple[Branch, ...]
    widened: str | None = None
    returned: tuple[str, ...] = ()
    settings: tuple[tuple[str, object], ...] = ()
    absent: tuple[str, ...] = ()

    @property
    def sub_layers(self) -> tuple[SubLayer, ...]:
        """What they are called: two are attention and MLP, others after the module that they run."""
        if len(self.branches) == len(SUB_LAYERS):
            return SUB_LAYERS
        names: list[str] = []
        for branch in self.branches:
            run = [name.removeprefix("self_") for name in branch.modules if not any(word in name for word in ASIDE)]
            name = "_".join(run) or "block"
            names.append(f"{name}_{len(names)}" if name in names else name)
        return tuple(SubLayer(f"{name}_hc", f"{name}_branch", name) for name in names)


@dataclass
class _Part:
    """What stands before an addition.

    streams: the names that the stream has in it.
    statements: those that are not copies of the stream, each with the line that its own lines, comments above it
        included, come after.
    added: the expression that is added.
    """

    streams: set[str]
    statements: list[tuple[int, ast.stmt]] = field(default_factory=list)
    added: ast.expr | None = None

    @property
    def given(self) -> set[str]:
        """What it reads before it makes it."""
        return read_before_made([*(node for _, node in self.statements), self.added])

    @property
    def assured(self) -> set[str]:
        """What it makes whatever its conditions are."""
        assigned = (node for _, node in self.statements if isinstance(node, ast.Assign))
        return made([child for node in assigned for target in node.targets for child in ast.walk(target)])

    def reads(self, name: str) -> bool:
        """Whether the statements so far read what a name was before them, and that was not the stream."""
        return name not in self.streams and name in read_before_made([node for _, node in self.statements])

    @property
    def nodes(self) -> list[ast.AST]:
        """All that the statements and the expression are made of."""
        return [node for each in (*(each for _, each in self.statements), self.added) for node in ast.walk(each)]


def cut_branches(
    forward: ast.FunctionDef,
    source: str,
    layer: str,
    fields: Mapping[str, tuple[str, object]] | None = None,
    module: object = None,
) -> Cut:
    """The branches of a decoder layer's `forward`.

    source: in which the positions of `forward` are; layer: the name of its class.
    fields: the field of the config behind an expression, as `self.use_parallel_residual`, and its default. Where the
        form of the layer depends on them, it is that with the defaults.
    module: the layer itself, where there is one. Where the form depends on its attributes, it is that which they have.

    Raises `UnsupportedCheckpointError` when it is not a chain of additions to the stream, or a branch needs what an
    earlier one may not have made.
    """
    body = [node for node in forward.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    if not body:
        raise refusal(layer, "nothing is added to the stream that it takes")
    line = body[0].lineno - 1
    try:
        return _cut([*Settled({}, frozenset()).statements(body, line)], forward, source, layer)
    except UnsupportedCheckpointError:
        optional = frozenset(_optional(forward.args)) - made([*ast.walk(forward)])
        if module is not None:
            statements = [*OfLayer(module, forward.args.args[1].arg).statements(body, line)]
            return _cut(statements, forward, source, layer)
        settled = Settled(fields or {}, optional)
        statements = [*settled.statements(body, line)]
        if not settled.required and not settled.absent:
            raise
    cut = _cut(statements, forward, source, layer)
    return replace(cut, settings=tuple(settled.required.items()), absent=tuple(sorted(settled.absent)))


def _cut(statements: list[tuple[int, ast.stmt]], forward: ast.FunctionDef, source: str, layer: str) -> Cut:
    """The branches of a forward that runs these statements, each with the line that its own lines come after."""
    taken = [argument.arg for argument in (*forward.args.posonlyargs, *forward.args.args)]
    if len(taken) < 2 or taken[0] != "self":
        raise refusal(layer, "it takes no stream")
    streams, widened = {taken[1]}, None
    parts, part = [], _Part({taken[1]})
    *statements, (_, last) = statements
    for line, node in statements:
        if (added := _added(node, streams)) is not None:
            part.added = added
            parts.append(part)
            streams = {node.targets[0].id}
            part = _Part({node.targets[0].id})
        elif _is_copy(node, streams) and not part.reads(node.targets[0].id):
            streams.add(node.targets[0].id)
            part.streams.add(node.targets[0].id)
        elif not parts and (name := _widens(node, streams)) is not None:
            widened, kept = name
            streams = {kept}
        elif _changes_in_place(node, streams):
            raise refusal(layer, "it changes the stream in place")
        else:
            streams -= made([*ast.walk(node)])
            part.statements.append((line, node))
    if any(isinstance(node, ast.Return) for _, statement in statements for node in ast.walk(statement)):
        raise refusal(layer, "it returns at several places")
    if not parts:
        raise refusal(layer, "nothing is added to the stream that it takes")
    stream, *returned = _returned(last) or [None]
    if stream not in streams and streams & set(returned):
        raise refusal(layer, f"it hands {stream} on, too, a second residual stream")
    if stream is None or not all(any(name in made(each.nodes) for each in parts) for name in returned):
        raise refusal(layer, "it returns more than the stream")
    if stream not in streams or part.statements:
        raise refusal(layer, "it changes the stream by more than additions")
    return Cut(tuple(_branches(parts, forward, source, layer, returned)), widened, tuple(returned))


def _branches(
    parts: list[_Part], forward: ast.FunctionDef, source: str, layer: str, returned: list[str]
) -> Iterator[Branch]:
    lines = source.splitlines()
    arguments = {argument.arg for argument in ast.walk(forward.args) if isinstance(argument, ast.arg)}
    others = forward.args.kwarg.arg if forward.args.kwarg else None
    handed_on = [_handed_on(parts, place, layer) for place in range(len(parts))]
    for place, part in enumerate(parts):
        is_first, statements = place == 0, [node for _, node in part.statements]
        if {"super", "__class__"} & read(part.nodes):
            raise refusal(layer, "a branch calls a method of its base class")
        stream, *copies = sorted(part.given & part.streams, key=lambda name: (name != "hidden_states", name)) or [
            "hidden_states"
        ]
        text = [f"{name} = {stream}" for name in copies]
        for line, node in part.statements:
            text += dedent("\n".join(lines[line : node.end_lineno])).strip("\n").splitlines()
        later = {name for names in handed_on[place + 1 :] for name in names} - {*returned}
        perhaps_anew = later & made(part.nodes) & _assured(parts[:place]) - part.assured
        given = handed_on[place] | perhaps_anew
        taken = (part.given | perhaps_anew) & arguments - part.streams
        signature, defaults = _signature(forward.args, None if is_first or others in taken else taken)
        usual = (
            _is_usual_attention(statements, forward.args)
            if is_first
            else "\n".join(map(ast.unparse, statements)) == USUAL_MLP
        )
        yield Branch(
            stream=stream,
            arguments=(*sorted(given - arguments), *signature),
            statements="\n".join(text),
            result=ast.get_source_segment(source, part.added),
            returned=(
                *(name for name in returned if name in made(part.nodes)),
                *sorted(later & part.assured | perhaps_anew),
            ),
            names=global_names([*part.nodes, *defaults], arguments | part.streams | given | {"self"}),
            modules=tuple(dict.fromkeys(_called(part.nodes))),
            has_usual_statements=usual and len(parts) == len(SUB_LAYERS),
        )


def _handed_on(parts: list[_Part], place: int, layer: str) -> set[str]:
    """What a branch reads, besides the stream, that earlier ones made."""
    part, earlier = parts[place], parts[:place]
    before = {name for each in earlier for name in made(each.nodes) | each.streams}
    foreign = part.given & before - part.streams
    assured = _assured(earlier) - {name for each in earlier for name in each.streams}
    if not foreign <= assured:
        names = ", ".join(sorted(foreign - assured))
        raise refusal(layer, f"a branch reads {names}, which an earlier one made in some cases, or as its stream")
    if foreign and not part.given & part.streams:
        raise refusal(layer, f"a branch reads {', '.join(sorted(foreign))}, which an earlier one made, and no stream")
    return foreign


def _assured(parts: list[_Part]) -> set[str]:
    """What has been made after these parts whatever their conditions are."""
    return {name for part in parts for name in part.assured}


def digest(forward: str) -> str:
    """A short digest of the source of a `forward`, whatever stands above its `def` and however it is spaced."""
    text = " ".join(forward[forward.index("def forward") :].split())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def refusal(layer: str, reason: str) -> UnsupportedCheckpointError:
    """What to raise for a layer of another form."""
    return UnsupportedCheckpointError(
        f"the forward of {layer} is not a chain of branches, each added to the residual stream: {reason}. So "
        f"hyper-connections can't stand for its additions."
    )


def _returned(statement: ast.stmt) -> list[str] | None:
    """The names in `return stream` or `return stream, name`; None for another statement."""
    match statement:
        case ast.Return(ast.Name(name)):
            return [name]
        case ast.Return(ast.Tuple(elements)) if all(isinstance(each, ast.Name) for each in elements):
            return [each.id for each in elements]
    return None


def _optional(arguments: ast.arguments) -> Iterator[str]:
    """The arguments whose default is None."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    pairs = [*zip(positional, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    for argument, default in pairs:
        if isinstance(default, ast.Constant) and default.value is None:
            yield argument.arg


def _added(statement: ast.stmt, streams: set[str]) -> ast.expr | None:
    """X of `name = stream + X` or `name = X + stream`."""
    match statement:
        case ast.Assign(targets=[ast.Name()], value=ast.BinOp(ast.Name(name), ast.Add(), added)) if name in streams:
            return added
        case ast.Assign(targets=[ast.Name()], value=ast.BinOp(added, ast.Add(), ast.Name(name))) if name in streams:
            return added
    return None


def _is_copy(statement: ast.stmt, streams: set[str]) -> bool:
    """Whether it is `name = stream`."""
    match statement:
        case ast.Assign(targets=[ast.Name()], value=ast.Name(name)):
            return name in streams
    return False


def _widens(statement: ast.stmt, streams: set[str]) -> tuple[str, str] | None:
    """The setting of `if self.setting: stream = stream.to(torch.float32)`, and that name of the stream."""
    match statement:
        case ast.If(
            test=ast.Attribute(ast.Name("self"), setting),
            body=[ast.Assign(targets=[ast.Name(name)], value=wide)],
            orelse=[],
        ) if name in streams and ast.unparse(wide) == f"{name}.to(torch.float32)":
            return setting, name
    return None


def _changes_in_place(statement: ast.stmt, streams: set[str]) -> bool:
    """Whether it is `stream += ...`, `stream[...] = ...`, or calls a method of the stream like `add_`."""
    for node in ast.walk(statement):
        match node:
            case ast.AugAssign(target=ast.Name(name)) | ast.Subscript(ast.Name(name), ctx=ast.Store()):
                if name in streams:
                    return True
            case ast.Call(func=ast.Attribute(ast.Name(name), method)):
                if name in streams and method.endswith("_"):
                    return True
    return False


def _signature(arguments: ast.arguments, taken: set[str] | None) -> tuple[tuple[str, ...], list[ast.AST]]:
    """What stands after `self` and the stream in a signature, without annotations, and the nodes of its defaults.

    taken: the names that are needed, of all that a layer is given; None for the signature of the layer itself.
    """
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    pairs = [*zip(positional, defaults, strict=True)][2:]
    named = [*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if taken is not None:
        pairs, named = [pair for pair in (*pairs, *named) if pair[0].arg in taken], []
    written = [_parameter(argument.arg, default) for argument, default in pairs]
    if taken is None and (arguments.vararg or named):
        written.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    written += [_parameter(argument.arg, default) for argument, default in named]
    if arguments.kwarg or taken is not None:
        written.append(f"**{arguments.kwarg.arg if arguments.kwarg else 'kwargs'}")
    nodes = [node for _, default in (*pairs, *named) if default for node in ast.walk(default)]
    return tuple(written), nodes


def _parameter(name: str, default: ast.expr | None) -> str:
    return name if default is None else f"{name}={ast.unparse(default)}"


def _is_usual_attention(statements: list[ast.stmt], arguments: ast.arguments) -> bool:
    """Whether it is norm and attention, which is given each argument of the layer under the same name."""
    before, call = statements[:-1], statements[-1] if statements else None
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


def _called(nodes: list[ast.AST]) -> Iterator[str]:
    """The attributes of `self` that are called."""
    for node in nodes:
        match node:
            case ast.Call(func=ast.Attribute(ast.Name("self"), name)):
                yield name
