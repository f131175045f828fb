"""The branches of a decoder layer, cut from the source of its `forward`.

A branch is what the layer computes from the residual stream before it adds that to the stream: of

    residual = hidden_states
    hidden_states = self.mlp(self.norm(hidden_states))
    hidden_states = residual + hidden_states

the second line. The stream is followed by name: what is given to the layer, its copies, and every sum.
"""

import ast
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import UnsupportedCheckpointError
from ...models.sub_layers import SUB_LAYERS
from ..branch import STREAM, Branch, Cut
from .additions import (
    added_in_another_shape,
    added_to,
    added_twice,
    changes_each_alike,
    changes_in_place,
    is_copy,
    names_returned,
    reshapes,
    returned_at_once,
    widens,
    with_sum_before_return,
)
from .inlining import Inliner
from .settings import Settled, settled_by
from .source_files import Definition
from .statements import OfLayer, Statement, attributes_called, global_names, made, read, read_before_made

USUAL_ATTENTION = "hidden_states = self.input_layernorm(hidden_states)"
USUAL_MLP = "hidden_states = self.post_attention_layernorm(hidden_states)\nhidden_states = self.mlp(hidden_states)"


@dataclass
class _Part:
    """What stands before an addition.

    streams: the names that the stream has in it; reshaped: those that it has in another shape; copies: of these, the
        ones that only an addition may read.
    statements: those that are not copies of the stream.
    added: the expression that is added, and its source.
    given: the argument without which it is left out; None for none.
    after: what changes the stream once that is added.
    """

    streams: set[str]
    reshaped: set[str] = field(default_factory=set)
    copies: set[str] = field(default_factory=set)
    statements: list[Statement] = field(default_factory=list)
    added: Any = None
    source: str = ""
    given: str | None = None
    after: list[Statement] = field(default_factory=list)

    @property
    def taken(self) -> set[str]:
        """What it reads before it makes it."""
        return read_before_made([*(each.node for each in self.statements), self.added])

    @property
    def assured(self) -> set[str]:
        """What it makes whatever its conditions are."""
        assigned = (each.node for each in self.statements if isinstance(each.node, ast.Assign))
        return made([child for node in assigned for target in node.targets for child in ast.walk(target)])

    def reads(self, name: str) -> bool:
        """Whether the statements so far read what a name was before them, and that was not the stream."""
        return name not in self.streams and name in read_before_made([each.node for each in self.statements])

    @property
    def nodes(self) -> list[ast.AST]:
        """All that the statements and the expression are made of."""
        return [node for each in (*(each.node for each in self.statements), self.added) for node in ast.walk(each)]


def cut_branches(
    forward: ast.FunctionDef,
    source: str,
    layer: str,
    definition: Definition | None = None,
    config: Definition | None = None,
    known: Mapping[str, object] | None = None,
    module: object = None,
) -> Cut:
    """The branches of a decoder layer's `forward`.

    source: in which the positions of `forward` are; layer: the name of its class.
    definition, config: of the class and of its config, where their source is to be read: where the form of the layer
        depends on fields of the config, it is that with their defaults, and additions may stand in its modules.
    known: fields of the config that this layer always has with these values.
    module: the layer itself, where there is one. Where the form depends on its attributes, it is that which they have.

    Raises `UnsupportedCheckpointError` when it is not a chain of additions to the stream, or a branch needs what an
    earlier one may not have made.
    """
    body = [node for node in forward.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    if not body:
        raise refusal(layer, "nothing is added to the stream that it takes")
    line, lines = body[0].lineno - 1, source.splitlines()
    try:
        return _cut([*Settled(lines).statements(body, line)], forward, layer, None)
    except UnsupportedCheckpointError:
        if module is not None:
            chosen = OfLayer(lines, module, forward.args.args[1].arg)
            return _cut([*chosen.statements(body, line)], forward, layer, None)
        if definition is None or config is None:
            settled, inliner = Settled(lines, optional=_optional(forward)), None
        else:
            settled = settled_by(definition, config, lines, known or {}, _optional(forward))
            inliner = Inliner(definition, settled)
        statements = [*settled.statements(body, line)]
        cut = _cut(statements, forward, layer, inliner)
    return replace(
        cut,
        settings=tuple(settled.required.items()),
        absent=tuple(sorted(settled.absent)),
        inlined=tuple(inliner.inlined) if inliner else (),
        sources=tuple(inliner.sources) if inliner else (),
    )


def _cut(statements: list[Statement], forward: ast.FunctionDef, layer: str, inliner: Inliner | None) -> Cut:
    """The branches of a forward that runs these statements."""
    taken = [argument.arg for argument in (*forward.args.posonlyargs, *forward.args.args)]
    if len(taken) < 2 or taken[0] != "self":
        raise refusal(layer, "it takes no stream")
    streams, widened = {taken[1]}, None
    parts: list[_Part] = []
    part = _Part({taken[1]})
    *others, (last, *_) = with_sum_before_return(statements)
    match returned_at_once(last, others[-1].node) if others else None:
        case ast.Return(ast.Tuple()) as last:
            others.pop()
    stream, *returned = names_returned(last) or [""]
    unless_made = {name for name in returned if any(_is_none(each.node, name) for each in others)} - {*taken}
    ahead = deque(each for each in others if not any(_is_none(each.node, name) for name in unless_made))
    while ahead:
        statement = ahead.popleft()
        if inliner is not None and (found := inliner.expanded(statement, streams)) is not None:
            ahead.extendleft(reversed(found))
            continue
        node = statement.node
        if is_copy(node, streams) and not part.reads(node.targets[0].id):
            streams.add(node.targets[0].id)
            part.streams.add(node.targets[0].id)
            continue
        if parts and not part.statements and changes_each_alike(node, streams & {STREAM}):
            if statement.given != parts[-1].given:
                raise refusal(layer, f"the stream is changed only where {statement.given} is given")
            parts[-1].after.append(statement)
            streams, part = {STREAM}, _Part({STREAM})
            continue
        if not part.statements:
            part.given = statement.given
        elif part.given != statement.given:
            raise refusal(layer, f"what depends on {part.given or statement.given} is no branch by itself")
        if (both := added_twice(statement, streams)) is not None:
            ahead.extendleft(reversed(both))
        elif (added := added_to(node, streams) or added_in_another_shape(node, part.reshaped)) is not None:
            part.added = added
            part.source = ast.get_source_segment(statement.text, added) or ast.unparse(added)
            parts.append(part)
            streams = {node.targets[0].id}
            part = _Part({node.targets[0].id})
        elif is_copy(node, part.reshaped):
            part.reshaped.add(node.targets[0].id)
            part.copies.add(node.targets[0].id)
        elif not parts and (name := widens(node, streams)) is not None:
            widened, kept = name
            streams = {kept}
        elif changes_in_place(node, streams):
            raise refusal(layer, "it changes the stream in place")
        else:
            part.reshaped -= made([*ast.walk(node)])
            if reshapes(node, streams):
                part.reshaped.add(node.targets[0].id)
            streams -= made([*ast.walk(node)])
            part.statements.append(statement)
    if any(isinstance(node, ast.Return) for each in others for node in ast.walk(each.node)):
        raise refusal(layer, "it returns at several places")
    if not parts:
        raise refusal(layer, "nothing is added to the stream that it takes")
    if stream not in streams and streams & {*returned}:
        raise refusal(layer, f"it hands {stream} on, too, a second residual stream")
    from_parts = {name for each in parts for name in made(each.nodes)} | unless_made
    if not stream or not from_parts >= {*returned}:
        raise refusal(layer, "it returns more than the stream")
    if stream not in streams or part.statements:
        raise refusal(layer, "it changes the stream by more than additions")
    is_tuple = isinstance(last.value, ast.Tuple)
    branches = tuple(_branches(parts, forward, layer, returned))
    return Cut(branches, widened, tuple(returned) if is_tuple else None)


def _branches(parts: list[_Part], forward: ast.FunctionDef, layer: str, returned: list[str]) -> Iterator[Branch]:
    arguments = {argument.arg for argument in ast.walk(forward.args) if isinstance(argument, ast.arg)}
    others = forward.args.kwarg.arg if forward.args.kwarg else None
    handed_on = [_handed_on(parts, place, layer) for place in range(len(parts))]
    for place, part in enumerate(parts):
        is_first, statements = place == 0, [each.node for each in part.statements]
        if {"super", "__class__"} & read(part.nodes):
            raise refusal(layer, "a branch calls a method of its base class")
        if part.taken & part.copies:
            raise refusal(layer, "it reads the stream in another shape")
        found = sorted(part.taken & part.streams, key=lambda name: (name != STREAM, name))
        stream, *copies = found or [STREAM]
        later = {name for names in handed_on[place + 1 :] for name in names} - {*returned}
        perhaps_anew = later & made(part.nodes) & _assured(parts[:place]) - part.assured
        given = handed_on[place] | perhaps_anew
        taken = (part.taken | perhaps_anew) & arguments - part.streams
        signature, defaults = _signature(forward.args, None if is_first or others in taken else taken)
        usual = (
            _is_usual_attention(statements, forward.args)
            if is_first
            else "\n".join(map(ast.unparse, statements)) == USUAL_MLP
        )
        after = [each.node for each in part.after]
        foreign = arguments | {name for each in parts for name in made(each.nodes)}
        if (read_before_made(after) - {STREAM, "self"}) & foreign:
            raise refusal(layer, "what changes the stream depends on more than the layer")
        yield Branch(
            stream=stream,
            arguments=(*sorted(given - arguments), *signature),
            statements="\n".join(
                [*(f"{name} = {stream}" for name in copies), *(each.text for each in part.statements)]
            ),
            result=part.source,
            returned=(
                *(name for name in returned if name in made(part.nodes)),
                *sorted(later & part.assured | perhaps_anew),
            ),
            names=global_names([*part.nodes, *defaults], arguments | part.streams | given | {"self"})
            | global_names([node for each in after for node in ast.walk(each)], {"self"}),
            modules=tuple(dict.fromkeys(attributes_called(part.nodes))),
            has_usual_statements=usual and len(parts) == len(SUB_LAYERS),
            given=part.given,
            after="\n".join(each.text for each in part.after),
            reads=bool(found),
        )


def _is_none(statement: ast.stmt, name: str) -> bool:
    """Whether it is `name = None`."""
    match statement:
        case ast.Assign([ast.Name(target)], ast.Constant(None)):
            return target == name
    return False


def _handed_on(parts: list[_Part], place: int, layer: str) -> set[str]:
    """What a branch reads, besides the stream, that earlier ones made."""
    part, earlier = parts[place], parts[:place]
    before = {name for each in earlier for name in made(each.nodes) | each.streams}
    foreign = part.taken & before - part.streams
    assured = _assured(earlier) - {name for each in earlier for name in each.streams}
    if not foreign <= assured:
        names = ", ".join(sorted(foreign - assured))
        raise refusal(layer, f"a branch reads {names}, which an earlier one made in some cases, or as its stream")
    return foreign


def _assured(parts: list[_Part]) -> set[str]:
    """What has been made after these parts whatever their conditions are."""
    return {name for part in parts if part.given is None for name in part.assured}


def refusal(layer: str, reason: str) -> UnsupportedCheckpointError:
    """What to raise for a layer of another form."""
    return UnsupportedCheckpointError(
        f"the forward of {layer} is not a chain of branches, each added to the residual stream: {reason}. So "
        f"hyper-connections can't stand for its additions."
    )


def _optional(forward: ast.FunctionDef) -> frozenset[str]:
    """The arguments whose default is None, and that stay what they are."""
    arguments = forward.args
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    pairs = [*zip(positional, defaults, strict=True), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    found = {each.arg for each, value in pairs if isinstance(value, ast.Constant) and value.value is None}
    return frozenset(found - made([*ast.walk(forward)]))


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
