"""Conversion of a model that is already loaded."""

import os
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..errors import UnsupportedCheckpointError
from ..families.family import Family, find_family, name_of_family, refuse_other_stacks
from ..models.connection_fields import GivenFields, unknown_fields, unread_field
from ..models.layer_source import digest_of_functions
from ..models.modeling_hyper_connections import HyperConnectionPreTrainedModel, plain_class
from ..models.sub_layers import is_of_connection
from ..wrappers import config_of, hooks_of, is_of_diffusers
from .generic import hyper_connection_class
from .hand_settings import LOST, SetByHand
from .running_code import LIBRARIES, package_of, patch_refusal, running_code

if TYPE_CHECKING:
    from typing import Never, Unpack

Model = TypeVar("Model", bound=nn.Module)
# Transformers' own, for recorded outputs and `enable_input_require_grads`, which a conversion gets anew
RENEWED_HOOKS = ("output_capturing_hook", "make_inputs_require_grads")
# attributes that `gradient_checkpointing_enable` and `loss_function = ...` set
CARRIED_ATTRIBUTES = ("_gradient_checkpointing_func", "_loss_function")


def convert_model(
    model: Model,
    *others: "Never",
    stack: str | None = None,
    **fields: "Unpack[GivenFields]",
) -> Model:
    """Give a loaded model hyper-connections at the equivalent initialization.

    The returned model shares the parameters and buffers of `model`: training one trains the other. It computes the
    same logits, bit for bit, except with the readouts "sum" and "learned". `model` stays unchanged. The returned model
    keeps frozen parameters, evaluation mode and weights (un)tied by hand.

    model: a Transformers model whose layers add branches to a residual stream, or a diffusion transformer of
        diffusers, such as DiT. A model of another class that is built like Transformers' can be converted and trained,
        but not saved whole.
    stack: the inner model that gets connections, by its attribute in the base model: "encoder" or "decoder" alone, or
        a tower such as "vision_tower". None for the usual ones: the language model, or encoder and decoder.
    fields: `connection`, `hc_mult` and others of `HyperConnectionConfig`; see its `from_prenorm` for None.

    Raises `TypeError` for fields without their names, and `ValueError` for fields that no conversion accepts. Raises
    `UnsupportedCheckpointError` for another kind of model, and for a quantized, distributed or offloaded model. Raises
    it also for a model with replaced, wrapped, patched or hooked modules.
    """
    if others:
        raise TypeError(
            f"convert_model accepts one argument without a name, the model (got {others[0]!r:.40} beside it). Name "
            f"the others, as in convert_model(model, hc_mult=4)."
        )
    if reason := unknown_fields(fields) or unread_field(fields):
        raise ValueError(f"{reason}.")
    return convert_with_fields(model, dict(fields), stack)


def convert_with_fields(
    model: Any,
    fields: dict,
    stack: str | None = None,
    check: Callable[[Any], object] = lambda converted: None,
) -> Any:
    """Convert a model as `convert_model` does, with any of the fields of `HyperConnectionConfig`.

    check: is called with the conversion before its hyper-connections use memory; its errors end the conversion.
    """
    _refuse_unusual(model)
    if is_of_diffusers(model) and stack is None:
        from ..diffusion import convert_transformer  # which imports diffusers

        return convert_transformer(model, fields, check)
    name = type(model).__name__
    refuse_other_stacks(name, getattr(model.config, "model_type", None), stack)
    hc_class = _class_of_family(type(model), model.config, stack) or hyper_connection_class(model)
    layer_config = getattr(model.config, getattr(hc_class.config_class, "part_field", ""), model.config)
    try:
        for layer_class in hc_class.layer_classes:
            layer_class.check_settings(layer_config)
    except ValueError as error:
        raise UnsupportedCheckpointError(f"this {name} can't be converted: {error}") from error
    config = hc_class.config_class.from_prenorm(model.config, **fields)
    if (head := model.get_output_embeddings()) is not None:
        config.tie_word_embeddings = head.weight is model.get_input_embeddings().weight
    with torch.device("meta"):
        converted = hc_class(config)
    _refuse_patched_since(converted)
    converted.train(model.training)
    _carry_over(model, converted)
    check(converted)
    converted.materialize_connections(model.device)
    converted.keep_weights()
    if model.can_generate():
        converted.generation_config = deepcopy(model.generation_config)
    if getattr(model, "_require_grads_hooks", None):
        converted.enable_input_require_grads()
    return converted


def _refuse_unusual(model: Any) -> None:
    """Refuse a model that is not whole on a device, in full precision and with one residual stream.

    Raises `UnsupportedCheckpointError`.
    """
    name, of_diffusers = type(model).__name__, is_of_diffusers(model)
    if isinstance(model, str | os.PathLike):
        raise UnsupportedCheckpointError(
            f"model must be a loaded model (got {os.fspath(model)!r:.200}). Load it by Transformers' from_pretrained "
            f"and convert that, or convert the checkpoint on the command line: hf-hyperconn convert MODEL."
        )
    if not (isinstance(model, PreTrainedModel) or of_diffusers):
        raise UnsupportedCheckpointError(
            f"model must be a model of Transformers or a diffusion transformer of diffusers (got {name}). Give one."
        )
    if hasattr(config_of(model), "base_model_type"):
        raise UnsupportedCheckpointError(
            f"model must have one residual stream (got {name}, which has connections already). Give its base."
        )
    if getattr(model, "hf_quantizer", None) is not None:
        raise UnsupportedCheckpointError(f"this {name} is quantized; load it in full precision and convert that.")
    if len(set(getattr(model, "hf_device_map", {}).values())) > 1:
        instead = "load it on one" if of_diffusers else "use from_prenorm(..., device_map=...) instead"
        raise UnsupportedCheckpointError(f"this {name} is spread over several devices; {instead}.")
    if any(hasattr(module, "_hf_hook") for module in model.modules()):
        raise UnsupportedCheckpointError(
            f"accelerate moves the weights of this {name} between devices while it runs; load it without offloading."
        )


def _class_of_family(model_class: type[PreTrainedModel], config: PreTrainedConfig, stack: str | None) -> Any:
    """Return the hyper-connection class for a class of Transformers; None for a class that no Auto class finds.

    Raises `UnsupportedCheckpointError` for layers of another form, and for a `stack` of a class without stacks.
    """
    name = model_class.__name__
    if model_class.__module__.startswith("transformers.models."):
        family = find_family(name_of_family(config.to_dict(), stack))
        if name in family.architectures:
            _refuse_patched(family)
            return getattr(family.modeling_module(), f"HC{name}")
    if stack is not None:
        raise UnsupportedCheckpointError(f"stack must be None in a {name} (got {stack!r:.40}).")
    return None


def _refuse_patched(family: Family) -> None:
    """Refuse a family whose files were made from other forwards than the running ones.

    Raises `UnsupportedCheckpointError`.
    """
    for stack in (family.part or family).stacks:
        for name, read in stack.source.read.items():
            runs_layers = name == stack.source.loop[0]  # whose forward is called, with its decorators
            decorated_by = (*LIBRARIES, "torch") if runs_layers else LIBRARIES
            code = running_code(stack.base_class(name), decorated_by)
            runs = digest_of_functions([(code.definition, "")], spelled=True)
            if package_of(code.function) not in LIBRARIES or runs != read:
                raise patch_refusal(f"{name}.forward", f"{code.function.__qualname__} runs in its place")


def _refuse_patched_since(converted: nn.Module) -> None:
    """Refuse a model whose class has another method than when connections were put around it.

    Raises `UnsupportedCheckpointError`.
    """
    classes = {ancestor for module in converted.modules() for ancestor in type(module).__mro__}
    for hc_class in classes:
        if issubclass(hc_class, HyperConnectionPreTrainedModel) and issubclass(hc_class, nn.Module):
            base = plain_class(hc_class)
            for name, own in vars(hc_class).items():
                inner = getattr(own, "__wrapped__", None)
                if not name.startswith("__") and inner is not None and inner is not getattr(base, name, inner):
                    raise patch_refusal(
                        f"{base.__name__}.{name}", "it was replaced since this process converted another"
                    )


def _carry_over(model: PreTrainedModel, converted: PreTrainedModel) -> None:
    """Give a conversion on the meta device its base's parameters, buffers and settings of modules."""
    name = type(model).__name__
    shapes, expected = _shapes(model), _shapes(converted)
    for key in [*shapes, *(key for key in expected if not is_of_connection(key))]:
        if shapes.get(key) != expected.get(key):
            if key not in expected:
                reason = "has no counterpart"
            elif key not in shapes:
                reason = "is missing"
            else:
                reason = f"is {list(shapes[key])} where its config says {list(expected[key])}"
            raise UnsupportedCheckpointError(
                f"this {name} is not as Transformers builds it from its config: {key} {reason}. "
                f"Merge or remove adapters and wrappers first, and make the config fit the model."
            )
    targets = dict(converted.named_modules(remove_duplicate=False))
    sources = dict(model.named_modules(remove_duplicate=False))
    by_hand = SetByHand((source, targets[path]) for path, source in sources.items() if path in targets)
    for path, source in sources.items():
        for obstacle in _obstacles(source, targets.get(path), by_hand):
            raise UnsupportedCheckpointError(
                f"{path or 'the model'} has {obstacle}, which a conversion of this {name} would lose. Convert first, "
                f"and do that to the converted model; after training in mixed precision, "
                f"accelerator.unwrap_model(model, keep_fp32_wrapper=False) removes its additions."
            )
    for path, source in sources.items():
        _share(source, targets[path])
        targets[path].__dict__.update(by_hand.settings(source))


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {key: parameter.shape for key, parameter in model.named_parameters(remove_duplicate=False)}


def _obstacles(source: nn.Module, target: nn.Module | None, by_hand: SetByHand) -> Iterator[str]:
    """Yield the parts of a base's module that its counterpart would lose."""
    if not isinstance(target, type(source)):
        place = "" if target is None else f" in the place of {type(target).__name__}"
        yield f"a module of class {type(source).__name__}{place}"
        return
    for kind, names in hooks_of(source).items():
        for name in sorted(names - hooks_of(target)[kind]):
            if not (name.startswith("transformers.") and name.endswith(RENEWED_HOOKS)):
                yield f"a hook ({name})"
    for name, value in vars(source).items():
        if name not in vars(target) and callable(value) and _is_another(value, getattr(type(source), name, None)):
            yield f"another {name!r} than its class"
    for name, value in by_hand.settings(source).items():
        if value is LOST:
            yield f"another {name!r} than its config says"


def _is_another(own: Callable, of_class: object) -> bool:
    """Tell whether a module's own attribute replaces a method of its class by another function.

    Accelerate, when it unwraps a model, leaves the method itself there, without its decorators.
    """
    function = of_class
    while function is not None:
        if getattr(own, "__func__", own) is function:
            return False
        function = getattr(function, "__wrapped__", None)
    return callable(of_class)


def _share(source: nn.Module, target: nn.Module) -> None:
    """Give a module the parameters, buffers and functions of another."""
    target._parameters.update(source._parameters)
    target._buffers.update(source._buffers)
    target._non_persistent_buffers_set |= source._non_persistent_buffers_set
    for name, value in vars(source).items():
        if name in CARRIED_ATTRIBUTES:
            vars(target)[name] = value
