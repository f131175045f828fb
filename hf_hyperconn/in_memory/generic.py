"""Hyper-connection classes for models that are not Transformers' own, but built like them.

Their branches are cut from the source of the decoder layer's `forward`, as a family's are. The classes exist in this
process only, because no file could import their bases.
"""

import ast
import inspect
from functools import cache, wraps
from typing import Any

import torch
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import GenerationMixin, PreTrainedConfig, PreTrainedModel

from ..errors import UnsupportedCheckpointError
from ..families.family_source import Cut
from ..families.reading.branches import cut_branches, layer_refusal
from ..families.reading.loops import read_layer_loop
from ..models.configuration_hyper_connections import HyperConnectionConfig
from ..models.connection_weights import fresh_copy
from ..models.decoder_layer import HyperConnectionDecoderLayer, for_every_stream, reduce_recorded_streams
from ..models.modeling_hyper_connections import (
    HyperConnectionHead,
    HyperConnectionModel,
    HyperConnectionPreTrainedModel,
)
from .running_code import RunningCode, patch_refusal, running_code


class _GenericDecoderLayer(HyperConnectionDecoderLayer):
    def make_norm(self) -> nn.Module:
        norms = [
            module
            for name, module in self.named_children()
            if ("norm" in name or name.startswith("ln_")) and type(module) is not nn.Identity
        ]
        return fresh_copy(norms[0]) if norms else nn.RMSNorm(self.config.hidden_size, eps=self.config.hc_eps)


class _GenericPreTrainedModel(HyperConnectionPreTrainedModel):
    def save_pretrained(self, save_directory, *args, **kwargs):
        """Refuse to save: nothing could load the folder.

        Raises `UnsupportedCheckpointError`.
        """
        raise self._has_no_code()

    def push_to_hub(self, *args, **kwargs):  # type: ignore[override]  # whatever it is given
        """Refuse to push, before a repo is made.

        Raises `UnsupportedCheckpointError`.
        """
        raise self._has_no_code()

    def _has_no_code(self) -> UnsupportedCheckpointError:
        return UnsupportedCheckpointError(
            f"{type(self).__name__} was made in this process of a class that is not Transformers' own, and no file "
            f"of model code could be saved with it. Save its state_dict (safetensors.torch.save_model) and load that "
            f"into a new convert_model(base); with Trainer, set save_strategy='no'. Conversions of Transformers' own "
            f"classes are saved whole."
        )


def hyper_connection_class(model: PreTrainedModel) -> type[HyperConnectionPreTrainedModel]:
    """Make the hyper-connection class for the class of `model`.

    Raises `UnsupportedCheckpointError` for decoder layers of another form.
    """
    layers = getattr(model.base_model, "layers", None)
    if not isinstance(layers, nn.ModuleList) or len({type(layer) for layer in layers}) != 1:
        raise UnsupportedCheckpointError(
            f"{type(model).__name__} has no `layers` of one class, so it can't be converted."
        )
    classes: list[Any] = [type(part) for part in (model, model.base_model, layers[0], model.config)]
    return _make_class(*classes, classes[1].forward, classes[2].forward)


@cache
def _make_class(
    model_class: type, base_class: Any, layer_class: Any, config_class: Any, *forwards: object
) -> type[HyperConnectionPreTrainedModel]:
    """Make the result of `hyper_connection_class`; again when a class has another forward."""
    attributes = layer_attributes(layer_class, cut_layer(layer_class))
    loop = read_layer_loop(running_code(base_class, decorated_by=None).definition, base_class.__name__)
    if loop.takes_first != (attributes["returned"] is not None):
        raise layer_refusal(layer_class.__name__, "it returns other than its model takes")
    names = [*inspect.signature(layer_class.forward).parameters][2 : 2 + loop.positional]
    shared_class = next(cls for cls in base_class.__mro__ if PreTrainedModel in cls.__bases__)

    def new(transformers_class: type, *mixins: type, last: tuple[type, ...] = (), **namespace) -> Any:
        bases = (*mixins, transformers_class, *last)
        return type(f"HC{transformers_class.__name__}", bases, {"__module__": __name__, **namespace})

    types: dict[str, Any] = {"model_type": f"hc_{config_class.model_type}", "base_model_type": config_class.model_type}
    types["save_pretrained"] = PreTrainedConfig.save_pretrained  # without code, of which there is none
    config: type = strict(new(config_class, HyperConnectionConfig, **types))
    layer = new(layer_class, _GenericDecoderLayer, positional=tuple(names), **attributes)
    adopted: dict[str, Any] = {"config_class": config, "layer_classes": (layer,), "auto_map": {}}
    shared = new(shared_class, _GenericPreTrainedModel, **adopted)
    of_streams = {"forward": reduce_recorded_streams(base_class.forward), "hc_layerdrop": loop.layerdrop}
    if loop.between:
        of_streams[loop.between] = for_every_stream(getattr(base_class, loop.between))
    hc_base = new(base_class, HyperConnectionModel, shared, **of_streams)
    if model_class is base_class:
        return hc_base
    generation = (GenerationMixin,) if issubclass(model_class, GenerationMixin) else ()
    return new(model_class, HyperConnectionHead, shared, last=generation, model_class=hc_base)


def cut_layer(layer_class: type[nn.Module], layer: nn.Module | None = None) -> Cut:
    """Cut the branches of a layer's class, or of one layer by its attributes.

    Raises `UnsupportedCheckpointError` for a forward of another form, as `cut_branches`.
    """
    code = _code_of_layer(layer_class)
    return cut_branches(code.definition, code.source, layer_class.__name__, module=layer)


def layer_attributes(layer_class: type[nn.Module], cut: Cut) -> dict[str, Any]:
    """Return the attributes of a decoder layer on residual streams, with its branches as methods."""
    code = _code_of_layer(layer_class)
    attributes: dict[str, Any] = {
        "parts": cut.sub_layers,
        "widened": cut.widened,
        "returned": cut.returned,
        "absent": cut.absent,
    }
    for sub_layer, branch in zip(cut.sub_layers, cut.branches, strict=True):
        attributes[sub_layer.branch] = _compiled(branch.method(sub_layer.branch), code)
        if sub_layer.after is not None:
            attributes[sub_layer.after] = _for_each_stream(_compiled(branch.method_after(sub_layer.after), code))
    return attributes


def _for_each_stream(method: Any) -> Any:
    """Turn a method on a stream `[B, S, D]` into a method on streams `[B, S, N, D]`."""

    @wraps(method)
    def wrapper(self, streams: torch.Tensor) -> torch.Tensor:
        return torch.stack([method(self, stream) for stream in streams.unbind(-2)], dim=-2)

    return wrapper


def _code_of_layer(layer_class: type[nn.Module]) -> RunningCode:
    code = running_code(layer_class)
    free = {*code.function.__code__.co_freevars} - {"__class__"}  # which no branch may read
    if free:
        names = ", ".join(sorted(free))
        raise patch_refusal(f"{layer_class.__name__}.forward", f"it reads {names} of the function that it was made in")
    return code


def _compiled(source: str, code: RunningCode) -> Any:
    """Compile a method that was cut from a layer's forward, as a method of the same class.

    It reads the globals of the forward's module, and has the forward's defaults.
    """
    tree: Any = ast.parse(source)
    (definition,) = tree.body
    arguments = definition.args
    positional = arguments.args[len(arguments.args) - len(arguments.defaults) :]
    named = [name for name, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True) if default]
    arguments.defaults = [ast.Constant(None) for _ in arguments.defaults]
    arguments.kw_defaults = [default and ast.Constant(None) for default in arguments.kw_defaults]
    if code.class_name:
        tree = ast.parse(f"class {code.class_name}: pass")
        tree.body[0].body = [definition]
    namespace: dict[str, Any] = {}
    path = f"<{definition.name} of {code.function.__qualname__}>"
    exec(compile(ast.fix_missing_locations(tree), path, "exec"), code.function.__globals__, namespace)
    method = vars(namespace[code.class_name])[definition.name] if code.class_name else namespace[definition.name]
    defaults = inspect.signature(code.function).parameters
    method.__defaults__ = tuple(defaults[argument.arg].default for argument in positional) or None
    method.__kwdefaults__ = {argument.arg: defaults[argument.arg].default for argument in named} or None
    return method
