# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The weights of connections: modules that keep them float32, their start in a model, and warnings.

Some tools cast each tensor by itself, which no module sees: DeepSpeed's bf16 and fp16, accelerate's
`load_checkpoint_and_dispatch(dtype=)`, mergekit's `dtype`. DeepSpeed's ZeRO-3 splits parameters over ranks: between
its forwards a module holds empty ones.
"""

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.utils import logging

from .sub_layers import READOUT, is_of_connection

logger = logging.get_logger(__name__)

# attributes of AltUp, attention residuals and Keel that follow from k
PLACE_ATTRIBUTES = ("selected", "opens_block", "alpha")

if TYPE_CHECKING:
    Base = PreTrainedModel
else:
    Base = object


class InitializedModule(nn.Module):
    """A module whose `initial_values` serve its constructor and a model's `_init_weights`.

    decayed: names of its parameters with weight decay.
    """

    decayed: tuple[str, ...] = ()

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return every own parameter of the module at the start."""
        raise NotImplementedError

    def register_initial_values(self) -> None:
        """Make a parameter of each initial value."""
        for name, value in self.initial_values().items():
            self.register_parameter(name, nn.Parameter(value))


class WideModule(InitializedModule):
    """A module whose parameters stay float32 when a model is cast to 16 bits (`.to(torch.bfloat16)`, `.half()`).

    Parameters made or loaded in 16 bits stay so; the forward has to cast them up.
    """

    def _apply(self, fn, recurse=True):
        # `.to`, `.half`, `.cuda` and others apply `fn` to every parameter, gradient and buffer, children's included
        def widely(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            is_narrowed = result.is_floating_point() and result.itemsize < 4 <= tensor.itemsize
            return tensor.to(result.device, torch.float32) if is_narrowed else result

        return super()._apply(widely, recurse)


def fresh_copy(module: nn.Module) -> nn.Module:
    """Return a deep copy that a model initializes by itself; fake tensors, too, which `deepcopy` can't copy."""
    with gathered(module.parameters()):
        parameters = {id(p): nn.Parameter(p.detach().clone(), p.requires_grad) for p in module.parameters()}
    copy = deepcopy(module, parameters | {id(buffer): buffer.clone() for buffer in module.buffers()})
    for part in copy.modules():
        vars(part).pop("_is_hf_initialized", None)
    return copy


def in_float32(norm: nn.Module) -> nn.Module:
    """Return the norm in float32; unlike the in-place `.float()`, also with fake tensors."""
    for module in norm.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype != torch.float32:
                module.register_parameter(name, nn.Parameter(parameter.detach().float(), parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.float())
    return norm


class InitialWeights(Base):
    """Mixin before a family's `PreTrainedModel` that initializes weights that were not loaded."""

    def _initialize_weights(self, module, is_custom_code=False):
        # as for the base's class: Transformers expects of custom code that it may start weights that were loaded
        super()._initialize_weights(module)

    @torch.no_grad()
    def initialize_weights(self):
        # before a part that is a model of Transformers, such as Dinov2's encoder, starts them in its own way
        for part in self.modules():
            if isinstance(part, PreTrainedModel) and not isinstance(part, InitialWeights):
                for module in part.modules():
                    if isinstance(module, InitializedModule):
                        with gathered(module.parameters(recurse=False), changes=True):
                            self._initialize_weights(module)
        super().initialize_weights()
        scaled: Any = [module for module in self.modules() if getattr(module, "hc_is_scaled", None) is False]
        for module in scaled:
            module.hc_is_scaled = True
            parameter = getattr(module, module.hc_output_projection)
            if not getattr(parameter, "_is_hf_initialized", False):  # it was not loaded
                with gathered([parameter], changes=True):
                    parameter.mul_(self.config.connection_config.hc_mult**-0.5)

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, InitializedModule):
            for name, value in module.initial_values().items():
                parameter = getattr(module, name)
                init.copy_(parameter, _sharded_like(value, parameter))

    @torch.inference_mode(False)  # they may be trained later
    def materialize_connections(self, device: torch.device) -> None:
        """Create and initialize the connections' weights on the meta device, where loading leaves new weights."""
        for module in self.modules():
            if isinstance(module, InitialWeights):
                innermost = module  # a language model starts its norms in its own way
            if isinstance(module, InitializedModule) and any(p.is_meta for p in module.parameters()):
                module.to_empty(device=device)
                module.apply(innermost._init_weights)

    def keep_weights(self) -> None:
        """Mark all weights but the meta device's as initialized: a larger model may initialize its parts again."""
        for module in self.modules():
            if any(parameter.is_meta for parameter in module.parameters()):
                continue
            vars(module)["_is_hf_initialized"] = True
            if hasattr(module, "hc_is_scaled"):
                vars(module)["hc_is_scaled"] = True


def warn_of_narrow(dtypes: dict[str, torch.dtype]) -> None:
    """Warn once of parameters of connections that have 16 bits or fewer.

    dtypes: dtype of each parameter, by its name.
    """
    floating = {dtype for name, dtype in dtypes.items() if is_of_connection(name) and dtype.is_floating_point}
    if narrow := sorted(str(dtype).removeprefix("torch.") for dtype in floating if dtype.itemsize < 4):
        logger.warning_once(
            f"There are connections in {', '.join(narrow)}, where 1.003 is 1: coefficients are rounded, and small "
            f"steps of training are lost. Load them by from_pretrained, which keeps float32. With DeepSpeed train by "
            f'HCTrainer, or put "torch_autocast": {{"enabled": true, "dtype": "bfloat16"}} in its config instead of '
            f'"bf16". Merge models in float32.'
        )


def warn_of_training(layers: Iterable[Any]) -> None:
    """Warn once of connections in 16 bits, and of a frozen readout, in the layers that a forward will run.

    It checks one layer, because tools cast or freeze all alike.
    """
    if torch.compiler.is_compiling():
        return
    connected = [layer for layer in layers if hasattr(layer, "sub_layers")]
    if not connected:
        return
    first, last = connected[0], connected[-1]
    parameters = {
        f"{part.connection}.{name}": parameter
        for part, (connection, _) in zip(first.parts, first.sub_layers, strict=True)
        for name, parameter in connection.named_parameters()
    }
    warn_of_narrow({name: parameter.dtype for name, parameter in parameters.items()})
    readout: nn.Module | None = getattr(last, READOUT, None)
    if readout is None or not torch.is_grad_enabled() or not last.training:
        return
    weights = [*readout.parameters()]
    if weights and any(p.requires_grad for p in parameters.values()) and not any(p.requires_grad for p in weights):
        logger.warning_once(
            f"The connections are trained and their readout, {READOUT}, is frozen. With PEFT name it in "
            f"modules_to_save, too."
        )


def warn_of_old_places(model: nn.Module) -> None:
    """Warn of removed or moved layers with which the model, loaded again, computes something else."""
    for layers in model.modules():
        if not isinstance(layers, nn.ModuleList):
            continue
        connected: list[Any] = [layer for layer in layers if hasattr(layer, "make_connection")]
        connections: list[Any] = [
            (layer, getattr(layer, part.connection)) for layer in connected for part in layer.parts
        ]
        for k, (layer, connection) in enumerate(connections):
            if not any(hasattr(connection, name) for name in PLACE_ATTRIBUTES):
                continue
            with torch.device("meta"):
                new = layer.make_connection(k, len(connections))
            if any(getattr(connection, name, None) != getattr(new, name, None) for name in PLACE_ATTRIBUTES):
                logger.warning(
                    f"sub-layer {connection.sub_layer} is sub-layer {k} of {len(connections)} now, as layers have "
                    f"been removed or moved, and this kind of connection computes something else there: the "
                    f"saved model, loaded again, will differ from this one. Train it on from there, or keep all "
                    f"layers."
                )
                break


def gathered(parameters: Iterable[torch.Tensor], changes: bool = False) -> AbstractContextManager:
    """Return a context in which ZeRO-3's split parameters are gathered; every rank has to enter it.

    changes: whether they change within; afterwards each rank has the first rank's values.
    """
    split = [parameter for parameter in parameters if hasattr(parameter, "ds_shape")]
    if not split:
        return nullcontext()
    deepspeed: Any = sys.modules["deepspeed"]
    return deepspeed.zero.GatheredParameters(split, modifier_rank=0 if changes else None)


def _sharded_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """Return a rank's part of a value for a sharded parameter; all of it for another."""
    if not hasattr(parameter, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor  # not part of every build of torch

    sharded: Any = parameter
    return distribute_tensor(value, sharded.device_mesh, sharded.placements)
