# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""How the weights of a new model start: the base's as the family starts them, and those of its connections."""

from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel
from transformers import initialization as init

from .hyper_connections import InitialisedModule
from .split_parameters import whole

if TYPE_CHECKING:  # what the mixin stands before
    Base = PreTrainedModel
else:
    Base = object


class InitialWeights(Base):
    """Mixin before a family's `PreTrainedModel`, in which it starts what has not been loaded."""

    def _initialize_weights(self, module, is_custom_code=False):
        # as for the base's class, whose weights these are: what is custom code may not know which have been loaded
        super()._initialize_weights(module)

    @torch.no_grad()
    def initialize_weights(self):
        # before a part that is a model of Transformers', such as Dinov2's encoder, does it in its own way
        for part in self.modules():
            if isinstance(part, PreTrainedModel) and not isinstance(part, InitialWeights):
                for module in part.modules():
                    if isinstance(module, InitialisedModule):
                        with whole(module.parameters(recurse=False), changes=True):
                            self._initialize_weights(module)
        super().initialize_weights()
        scaled: Any = [each for each in self.modules() if getattr(each, "hc_is_scaled", None) is False]
        for module in scaled:
            module.hc_is_scaled = True
            parameter = getattr(module, module.hc_output_projection)
            if not getattr(parameter, "_is_hf_initialized", False):  # it was not loaded
                with whole([parameter], changes=True):
                    parameter.mul_(self.config.of_layers.hc_mult**-0.5)

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, InitialisedModule):
            for name, value in module.initial_values().items():
                parameter = getattr(module, name)
                init.copy_(parameter, _sharded_like(value, parameter))

    @torch.inference_mode(False)  # they may be trained later
    def materialise_connections(self, device: torch.device) -> None:
        """Create and initialise what hyper-connections have on the meta device, where loading leaves new weights."""
        for module in self.modules():
            if isinstance(module, InitialWeights):
                innermost = module  # a language model starts its norms in its own way
            if isinstance(module, InitialisedModule) and any(p.is_meta for p in module.parameters()):
                module.to_empty(device=device)
                module.apply(innermost._init_weights)

    def keep_weights(self) -> None:
        """Take all weights for initialised, also where the model becomes part of another, which starts its parts.

        Those on the meta device are none yet.
        """
        for module in self.modules():
            if any(parameter.is_meta for parameter in module.parameters()):
                continue
            vars(module)["_is_hf_initialized"] = True
            if hasattr(module, "hc_is_scaled"):
                vars(module)["hc_is_scaled"] = True


def _sharded_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The part of a value that each rank has of a parameter; all of it unless the parameter is sharded."""
    if not hasattr(parameter, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor  # not part of every build of torch

    sharded: Any = parameter
    return distribute_tensor(value, sharded.device_mesh, sharded.placements)
