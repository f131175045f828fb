"""The branches of a decoder layer, cut from the source of its `forward`.

A branch is the computation from the residual stream up to an addition to the stream: of

    residual = hidden_states
    hidden_states = self.mlp(self.norm(hidden_states))
    hidden_states = residual + hidden_states

the second line. The stream is followed by name: the layer's input, its copies, and every sum.
"""

import ast
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from ...errors import UnsupportedCheckpointError
from ...models.sub_layers import SUB_LAYERS
from ..family_source import STREAM, Branch, Cut
from .choices import Choice, ConfigChoice, LayerChoice
from .inlining import Inliner
from .source_files import Definition
from .statements import (
    Statement,
    added_in_another_shape,
    added_to,
    added_twice,
    assigned_names,
    attributes_called,
    changes_each_alike,
    changes_in_place,
    global_names,
    is_copy,
    names_returned,
    read_before_assigned,
    read_names,
    reshapes,
    returned_at_once,
    widens,
    with_sum_before_return,
)

USUAL_ATTENTION = "hidden_states = self.input_layernorm(hidden_states)"
USUAL_MLP = "hidden_states = self.post_attention_layernorm(hidden_states)\nhidden_states = self.mlp(hidden_states)"


def layer_refusal(layer: str, reason: str) -> UnsupportedCheckpointError:
    """Return the error to raise for a layer of another form."""
    return UnsupportedCheckpointError(
        f"the forward of {layer} is not a chain of branches, each added to the residual stream: {reason}. So "
        f"hyper-connections can't stand for its additions."
    )


def cut_branches(forward: ast.FunctionDef, source: str, layer: str, module: object = None) -> Cut:
    """Cut the branches of a decoder layer's `forward`.

    source: text of the file of `forward`. layer: name of its class.
    module: the layer itself, whose attributes choose the form; None for the config's choice.

    Raises `UnsupportedCheckpointError` when it is not a chain of additions to the stream, or a branch reads a value
    that an earlier one may not assign.
    """
    lines, stream = source.splitlines(), _arguments(forward, layer)[1]
    by_config = ConfigChoice(lines, _optional(forward))
    return _cut_by(by_config if module is None else LayerChoice(lines, module, stream), forward, layer)


def cut_branches_of_class(layer: Definition, config: Definition, known: Mapping[str, object] | None = None) -> Cut:
    """Cut the branches of a class of layers, whose additions may stand in its modules.

    config: class of its config, whose defaults choose the form.
    known: values of fields that are fixed for this layer.

    Raises `UnsupportedCheckpointError` as `cut_branches`.
    """
    forward, file = layer.own_method("forward")
    choice = ConfigChoice(file.text.splitlines(), _optional(forward), layer, config, known)
    return _cut_by(choice, forward, layer.name, Inliner(layer, choice))


def _cut_by(choice: Choice, forward: ast.FunctionDef, layer: str, inliner: Inliner | None = None) -> Cut:
    """Cut all statements of a forward; if that fails, only statements that run."""
    body = [node for node in forward.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    if not body:
        raise layer_refusal(layer, "nothing is added to the stream that it takes")
    line = body[0].lineno - 1
    try:
        return _Cutter(forward, layer).cut([*ConfigChoice(choice.lines).statements(body, line)])
    except UnsupportedCheckpointError:
        cut = _Cutter(forward, layer, inliner).cut([*choice.statements(body, line)])
    return replace(
        cut,
        settings=tuple(choice.required.items()),
        absent=tuple(sorted(choice.absent)),
        inlined=tuple(inliner.inlined) if inliner else (),
        sources=tuple(inliner.sources) if inliner else (),
    )


@dataclass
class _Segment:
    """The statements before an addition, and the addition.

    streams: names of the stream in it.
    reshaped: names of the stream in another shape.
    copies: reshaped names that only an addition may read.
    statements: statements that are not copies of the stream.
    added, source: the added expression, and its source.
    given: the argument without which it is left out; None for none.
    after: statements that change the stream after the addition.
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
    def trees(self) -> list[ast.AST]:
        """Return the statements and the expression."""
        return [*(statement.node for statement in self.statements), self.added]

    @property
    def taken(self) -> set[str]:
        """Return the names that the segment reads before it assigns them."""
        return read_before_assigned(self.trees)

    @property
    def assigned(self) -> set[str]:
        """Return the names that the segment assigns."""
        return assigned_names(*self.trees)

    @property
    def assured(self) -> set[str]:
        """Return the names that the segment assigns whatever its conditions are."""
        assignments = [tree for tree in self.trees if isinstance(tree, ast.Assign)]
        return assigned_names(*(target for node in assignments for target in node.targets))

    def reads(self, name: str) -> bool:
        """Tell whether the statements so far read an earlier value of a name other than the stream."""
        nodes = [statement.node for statement in self.statements]
        return name not in self.streams and name in read_before_assigned(nodes)


class _Cutter:
    """Cuts the statements of a forward into segments.

    layer: name of its class.
    streams: names of the stream at this place.
    segment: the current segment; segments: the finished ones.
    widened: the setting that makes the stream float32 before all else; None without one.
    """

    def __init__(self, forward: ast.FunctionDef, layer: str, inliner: Inliner | None = None):
        self.forward, self.layer, self.inliner = forward, layer, inliner
        self.arguments = _arguments(forward, layer)
        self.streams = {self.arguments[1]}
        self.segment = _Segment({self.arguments[1]})
        self.segments: list[_Segment] = []
        self.widened: str | None = None

    def cut(self, statements: list[Statement]) -> Cut:
        """Cut statements, of which the last returns the stream."""
        *others, (last, *_) = with_sum_before_return(statements)
        match returned_at_once(last, others[-1].node) if others else None:
            case ast.Return(ast.Tuple()) as last:
                others.pop()
        stream, *returned = names_returned(last) or [""]
        unless_made = {name for name in returned if any(_is_none(statement.node, name) for statement in others)}
        unless_made -= {*self.arguments}
        ahead = deque(
            statement for statement in others if not any(_is_none(statement.node, name) for name in unless_made)
        )
        while ahead:
            ahead.extendleft(reversed(self._take(ahead.popleft())))
        if any(isinstance(node, ast.Return) for statement in others for node in ast.walk(statement.node)):
            raise layer_refusal(self.layer, "it returns at several places")
        if not self.segments:
            raise layer_refusal(self.layer, "nothing is added to the stream that it takes")
        if stream not in self.streams and self.streams & {*returned}:
            raise layer_refusal(self.layer, f"it hands {stream} on, too, a second residual stream")
        by_branches = {name for segment in self.segments for name in segment.assigned} | unless_made
        if not stream or not by_branches >= {*returned}:
            raise layer_refusal(self.layer, "it returns more than the stream")
        if stream not in self.streams or self.segment.statements:
            raise layer_refusal(self.layer, "it changes the stream by more than additions")
        branches = tuple(_branches(self.segments, self.forward, self.layer, returned))
        return Cut(branches, self.widened, tuple(returned) if isinstance(last.value, ast.Tuple) else None)

    def _take(self, statement: Statement) -> list[Statement]:
        """Process a statement; return the statements that stand for it, if any."""
        if self.inliner and (expanded := self.inliner.expanded(statement, self.streams)) is not None:
            return expanded
        node, segment = statement.node, self.segment
        if is_copy(node, self.streams) and not segment.reads(node.targets[0].id):
            self.streams.add(node.targets[0].id)
            segment.streams.add(node.targets[0].id)
            return []
        if self.segments and not segment.statements and changes_each_alike(node, self.streams & {STREAM}):
            if statement.given != self.segments[-1].given:
                raise layer_refusal(self.layer, f"the stream is changed only where {statement.given} is given")
            self.segments[-1].after.append(statement)
            self._continue_as(STREAM)
            return []
        if not segment.statements:
            segment.given = statement.given
        elif segment.given != statement.given:
            raise layer_refusal(
                self.layer, f"what depends on {segment.given or statement.given} is no branch by itself"
            )
        if (both := added_twice(statement, self.streams)) is not None:
            return [*both]
        added = added_to(node, self.streams) or added_in_another_shape(node, segment.reshaped)
        if added is not None:
            segment.added = added
            segment.source = ast.get_source_segment(statement.text, added) or ast.unparse(added)
            self.segments.append(segment)
            self._continue_as(node.targets[0].id)
        else:
            self._take_of_branch(statement)
        return []

    def _continue_as(self, stream: str) -> None:
        """Begin a segment in which the stream has this name."""
        self.streams, self.segment = {stream}, _Segment({stream})

    def _take_of_branch(self, statement: Statement) -> None:
        """Process a statement that adds nothing to the stream."""
        node, segment = statement.node, self.segment
        if is_copy(node, segment.reshaped):
            segment.reshaped.add(node.targets[0].id)
            segment.copies.add(node.targets[0].id)
        elif not self.segments and (wide := widens(node, self.streams)) is not None:
            self.widened, stream = wide
            self.streams = {stream}
        elif changes_in_place(node, self.streams):
            raise layer_refusal(self.layer, "it changes the stream in place")
        else:
            assigned = assigned_names(node)
            segment.reshaped -= assigned
            if reshapes(node, self.streams):
                segment.reshaped.add(node.targets[0].id)
            self.streams -= assigned
            segment.statements.append(statement)


def _branches(segments: list[_Segment], forward: ast.FunctionDef, layer: str, returned: list[str]) -> Iterator[Branch]:
    arguments = {argument.arg for argument in ast.walk(forward.args) if isinstance(argument, ast.arg)}
    others = forward.args.kwarg.arg if forward.args.kwarg else None
    handed_on = [_handed_on(segments, place, layer) for place in range(len(segments))]
    foreign = arguments | {name for segment in segments for name in segment.assigned}
    for place, segment in enumerate(segments):
        if {"super", "__class__"} & read_names(*segment.trees):
            raise layer_refusal(layer, "a branch calls a method of its base class")
        if segment.taken & segment.copies:
            raise layer_refusal(layer, "it reads the stream in another shape")
        after = [statement.node for statement in segment.after]
        if (read_before_assigned(after) - {STREAM, "self"}) & foreign:
            raise layer_refusal(layer, "what changes the stream depends on more than the layer")
        read = sorted(segment.taken & segment.streams, key=lambda name: (name != STREAM, name))
        stream, *copies = read or [STREAM]
        later = {name for names in handed_on[place + 1 :] for name in names} - {*returned}
        perhaps_anew = later & segment.assigned & _assured(segments[:place]) - segment.assured
        given = handed_on[place] | perhaps_anew
        taken = (segment.taken | perhaps_anew) & arguments - segment.streams
        signature, defaults = _signature(forward.args, None if place == 0 or others in taken else taken)
        yield Branch(
            stream=stream,
            arguments=(*sorted(given - arguments), *signature),
            statements="\n".join(
                [*(f"{name} = {stream}" for name in copies), *(statement.text for statement in segment.statements)]
            ),
            result=segment.source,
            returned=(
                *(name for name in returned if name in segment.assigned),
                *sorted(later & segment.assured | perhaps_anew),
            ),
            names=global_names([*segment.trees, *defaults], arguments | segment.streams | given | {"self"})
            | global_names(after, {"self"}),
            modules=tuple(attributes_called(*segment.trees)),
            has_usual_statements=len(segments) == len(SUB_LAYERS)
            and _is_usual(segment.statements, None if place else forward.args),
            given=segment.given,
            after="\n".join(statement.text for statement in segment.after),
            reads=bool(read),
        )


def _is_none(statement: ast.stmt, name: str) -> bool:
    """Tell whether a statement is `name = None`."""
    match statement:
        case ast.Assign([ast.Name(target)], ast.Constant(None)):
            return target == name
    return False


def _handed_on(segments: list[_Segment], place: int, layer: str) -> set[str]:
    """Return the names that a branch reads, besides the stream, and that earlier ones assign."""
    segment, earlier = segments[place], segments[:place]
    of_streams = {name for before in earlier for name in before.streams}
    assigned = {name for before in earlier for name in before.assigned} | of_streams
    foreign = segment.taken & assigned - segment.streams
    assured = _assured(earlier) - of_streams
    if not foreign <= assured:
        names = ", ".join(sorted(foreign - assured))
        raise layer_refusal(
            layer, f"a branch reads {names}, which an earlier one made in some cases, or as its stream"
        )
    return foreign


def _assured(segments: list[_Segment]) -> set[str]:
    """Return the names that these segments assign whatever their conditions are."""
    return {name for segment in segments if segment.given is None for name in segment.assured}


def _arguments(forward: ast.FunctionDef, layer: str) -> list[str]:
    """Return the names of `self`, the stream, and the other arguments that have places."""
    arguments = [argument.arg for argument, _ in _with_defaults(forward.args)]
    if len(arguments) < 2 or arguments[0] != "self":
        raise layer_refusal(layer, "it takes no stream")
    return arguments


def _with_defaults(arguments: ast.arguments) -> list[tuple[ast.arg, ast.expr | None]]:
    """Return each argument that has a place, and its default."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + arguments.defaults
    return [*zip(positional, defaults, strict=True)]


def _optional(forward: ast.FunctionDef) -> frozenset[str]:
    """Return the arguments with default None that are never reassigned."""
    arguments = forward.args
    pairs = [*_with_defaults(arguments), *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    optional = {argument.arg for argument, value in pairs if isinstance(value, ast.Constant) and value.value is None}
    return frozenset(optional - assigned_names(forward))


def _signature(arguments: ast.arguments, taken: set[str] | None) -> tuple[tuple[str, ...], list[ast.expr]]:
    """Return the parameters after `self` and the stream, without annotations, and their defaults.

    taken: names of the layer's parameters to include; None for the layer's own signature.
    """
    pairs = _with_defaults(arguments)[2:]
    named = [*zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    if taken is not None:
        pairs, named = [pair for pair in (*pairs, *named) if pair[0].arg in taken], []
    written = [_parameter(argument.arg, default) for argument, default in pairs]
    if taken is None and (arguments.vararg or named):
        written.append(f"*{arguments.vararg.arg if arguments.vararg else ''}")
    written += [_parameter(argument.arg, default) for argument, default in named]
    if arguments.kwarg or taken is not None:
        written.append(f"**{arguments.kwarg.arg if arguments.kwarg else 'kwargs'}")
    return tuple(written), [default for _, default in (*pairs, *named) if default]


def _parameter(name: str, default: ast.expr | None) -> str:
    return name if default is None else f"{name}={ast.unparse(default)}"


def _is_usual(statements: list[Statement], arguments: ast.arguments | None) -> bool:
    """Tell whether statements are norm and MLP; with the layer's arguments, norm and attention with all of them."""
    written = [ast.unparse(statement.node) for statement in statements]
    if arguments is None:
        return "\n".join(written) == USUAL_MLP
    match statements[-1].node if statements else None:
        case ast.Assign(targets=[target], value=ast.Call(function, [], keywords)):
            taken = {argument.arg for argument in (*arguments.args, *arguments.kwonlyargs)} - {"self"}
            named = {keyword.arg: ast.unparse(keyword.value) for keyword in keywords}
            others = named.pop(None, None)
            return (
                written[:-1] == [USUAL_ATTENTION]
                and ast.unparse(target) == "(hidden_states, _)"
                and ast.unparse(function) == "self.self_attn"
                and named == {name: name for name in taken}
                and arguments.kwarg is not None
                and others == arguments.kwarg.arg
            )
    return False
