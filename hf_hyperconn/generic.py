"""Hyper-connection classes for any Transformers model whose layers add two branches to a residual stream.

The branches are taken out of the source of the decoder layer's own `forward`: what stands between
`residual = hidden_states` and `hidden_states = residual + ...`. A layer of any other form is refused. The classes live
in this process only; a family that should be saved has files of its own in `models`.
"""

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable
from copy import deepcopy
from functools import cache
from itertools import pairwise

from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from .errors import UnsupportedCheckpointError
from .families import FAMILIES
from .models.configuration_hyper_connections import HyperConnectionConfig
from .models.hyper_connections import copied
from .models.hyper_connections_layer import HyperConnectionDecoderLayer
from .models.modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
    reduce_recorded_streams,
)


class _GenericDecoderLayer(HyperConnectionDecoderLayer):
    def make_norm(self) -> nn.Module:
        norms = [
            module for name, module in self.named_children() if "norm" in name and type(module) is not nn.Identity
        ]
        if not norms:
            raise UnsupportedCheckpointError(
                f"{type(self).__name__} has no norm of its own, from which dynamic coefficients are predicted. "
                f"Use connection='shc'."
            )
        return copied(norms[0])


class _GenericPreTrainedModel(HyperConnectionPreTrainedModel):
    def save_pretrained(self, save_directory, **kwargs):
        """Refuse: nothing could load the folder.

        Raises `UnsupportedCheckpointError`.
        """
        raise UnsupportedCheckpointError(self._no_code())

    def push_to_hub(self, *args, **kwargs):
        """Refuse, before a repo is made.

        Raises `UnsupportedCheckpointError`.
        """
        raise UnsupportedCheckpointError(self._no_code())

    def _no_code(self) -> str:
        return (
            f"{type(self).__name__} was made in this process, and no file of model code could be saved with it. Save "
            f"its state_dict (safetensors.torch.save_model) and load that into a new convert_model(base); with "
            f"Trainer, set save_strategy='no'. Of these families, Transformers' own classes are saved whole: "
            f"{', '.join(FAMILIES)}."
        )


def hyper_connection_class(model: PreTrainedModel) -> type[PreTrainedModel]:
    """The hyper-connection class for the class of `model`, made now.

    Raises `UnsupportedCheckpointError` when its decoder layers are not of the form that hyper-connections replace.
    """
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len({type(layer) for layer in layers}) != 1:
        raise UnsupportedCheckpointError(
            f"{type(model).__name__} has no `layers` of one class, so it can't be converted. {_accepted()}"
        )
    return _make_class(type(model), type(model.base_model), type(layers[0]), type(model.config))


@cache
def _make_class(model_class: type, base_class: type, layer_class: type, config_class: type) -> type[PreTrainedModel]:
    attention_branch, mlp_branch = split_branches(layer_class)
    check_layer_loop(base_class)
    shared_class = next(cls for cls in base_class.__mro__ if PreTrainedModel in cls.__bases__)

    def new(transformers_class: type, *mixins: type, last: tuple[type, ...] = (), **namespace) -> type:
        bases = (*mixins, transformers_class, *last)
        return type(f"HC{transformers_class.__name__}", bases, {"__module__": __name__, **namespace})

    types = {"model_type": f"hc_{config_class.model_type}", "base_model_type": config_class.model_type}
    config = strict(new(config_class, HyperConnectionConfig, **types))
    branches = {"attention_branch": attention_branch, "mlp_branch": mlp_branch}
    layer = new(layer_class, _GenericDecoderLayer, **branches)
    adopted = {"config_class": config, "decoder_layer_class": layer, "heads": ()}
    shared = new(shared_class, _GenericPreTrainedModel, **adopted)
    hc_base = new(base_class, HyperConnectionModel, shared, forward=reduce_recorded_streams(base_class.forward))
    if model_class is base_class:
        return hc_base
    generation = (GenerationMixin,) if issubclass(model_class, GenerationMixin) else ()
    return new(model_class, HyperConnectionHead, shared, last=generation, model_class=hc_base)


def split_branches(layer_class: type[nn.Module]) -> tuple[Callable, Callable]:
    """The two branches of a decoder layer, as methods cut from its `forward`.

    Raises `UnsupportedCheckpointError` when its forward is not two times `residual = hidden_states`, a branch that
    does not touch `residual`, and `hidden_states = residual + ...`, and then `return hidden_states`.
    """
    owner, forward = _forward(layer_class)
    body = [node for node in forward.body if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))]
    starts = [i for i, node in enumerate(body) if ast.unparse(node) == "residual = hidden_states"]
    if len(starts) != 2 or starts[0] != 0 or ast.unparse(body[-1]) != "return hidden_states":
        raise UnsupportedCheckpointError(_refusal(layer_class))
    branches = []
    for start, end in pairwise([*starts, len(body) - 1]):
        *statements, addition = body[start + 1 : end]
        branches.append([*statements, ast.Return(_added(addition, layer_class))])
        if any(isinstance(node, ast.Name) and node.id == "residual" for s in branches[-1] for node in ast.walk(s)):
            raise UnsupportedCheckpointError(_refusal(layer_class))
    arguments = {argument.arg for argument in ast.walk(forward.args) if isinstance(argument, ast.arg)}
    made_before = {node.id for s in branches[0] for node in ast.walk(s) if _stores(node)}
    made = {node.id for s in branches[1] for node in ast.walk(s) if _stores(node)}
    read = {node.id for s in branches[1] for node in ast.walk(s) if isinstance(node, ast.Name)}
    if (read - made - {"self", "hidden_states"}) & (arguments | made_before):
        raise UnsupportedCheckpointError(_refusal(layer_class))
    only_hidden_states = ast.parse("def forward(self, hidden_states): ...").body[0].args
    return (
        _method("attention_branch", forward.args, branches[0], owner),
        _method("mlp_branch", only_hidden_states, branches[1], owner),
    )


def check_layer_loop(base_class: type[PreTrainedModel]) -> None:
    """Make sure that a base model only passes the stream from layer to layer.

    Raises `UnsupportedCheckpointError` when the loop over the layers in its forward skips some, or uses the stream.
    """
    _, forward = _forward(base_class)
    loops = [
        node for node in ast.walk(forward) if isinstance(node, ast.For) and "self.layers" in ast.unparse(node.iter)
    ]
    for loop in loops:
        uses = [statement for statement in loop.body if "hidden_states" in ast.unparse(statement)]
        jumps = any(isinstance(node, ast.Continue | ast.Break) for node in ast.walk(loop))
        if len(uses) == 1 and not jumps and _is_layer_call(uses[0], ast.unparse(loop.target)):
            return
    raise UnsupportedCheckpointError(
        f"the forward of {base_class.__name__} does more with the residual stream than to pass it from layer to "
        f"layer. {_accepted()}"
    )


def _is_layer_call(statement: ast.stmt, loop_variables: str) -> bool:
    """Whether it is `hidden_states = layer(hidden_states, ...)`."""
    match statement:
        case ast.Assign(
            targets=[ast.Name("hidden_states")],
            value=ast.Call(ast.Name(layer), [ast.Name("hidden_states"), *others], keywords),
        ):
            rest = [ast.unparse(node) for node in (*others, *keywords)]
            return layer in loop_variables and not any("hidden_states" in argument for argument in rest)
    return False


def _forward(cls: type) -> tuple[type, ast.FunctionDef]:
    """The class that defines the forward of `cls`, and its source."""
    owner = next(base for base in cls.__mro__ if "forward" in vars(base))
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(owner))).body[0]
    except (OSError, TypeError) as error:
        raise UnsupportedCheckpointError(f"the source of {owner.__name__} can't be read. {_accepted()}") from error
    return owner, next(node for node in tree.body if isinstance(node, ast.FunctionDef) and node.name == "forward")


def _added(statement: ast.stmt, layer_class: type) -> ast.expr:
    """X of `hidden_states = residual + X`."""
    match statement:
        case ast.Assign(
            targets=[ast.Name("hidden_states")], value=ast.BinOp(ast.Name("residual"), ast.Add(), branch_output)
        ):
            return branch_output
    raise UnsupportedCheckpointError(_refusal(layer_class))


def _stores(node: ast.AST) -> bool:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _method(name: str, arguments: ast.arguments, body: list[ast.stmt], owner: type) -> Callable:
    """A function of the module of `owner`, without annotations."""
    arguments = deepcopy(arguments)
    for argument in ast.walk(arguments):
        if isinstance(argument, ast.arg):
            argument.annotation = None
    function = ast.parse(f"def {name}(): ...").body[0]
    function.args, function.body = arguments, body
    module = ast.fix_missing_locations(ast.Module([function], type_ignores=[]))
    namespace: dict[str, Callable] = {}
    exec(compile(module, f"<{name} of {owner.__qualname__}>", "exec"), vars(sys.modules[owner.__module__]), namespace)
    return namespace[name]


def _refusal(layer_class: type) -> str:
    return (
        f"the forward of {layer_class.__name__} is not two branches, each added to the residual stream, so "
        f"hyper-connections can't stand for its additions. {_accepted()}"
    )


def _accepted() -> str:
    return f"Families with files of their own: {', '.join(FAMILIES)}."
