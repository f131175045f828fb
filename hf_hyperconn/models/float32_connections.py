# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Telling of connections that can't learn, which nothing else shows: rounded to 16 bits, or with a frozen readout.

`WideModule` keeps parameters float32 when a module is cast. Some tools cast each tensor by itself, which no module
sees: DeepSpeed's bf16 and fp16, accelerate's `load_checkpoint_and_dispatch(dtype=)`, mergekit's `dtype`.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import logging

from .sub_layers import READOUT, is_of_connection
from .transformers_seam import dtypes_in

logger = logging.get_logger(__name__)

if TYPE_CHECKING:  # what the mixin stands before
    Base = PreTrainedModel
else:
    Base = object


class Float32Connections(Base):
    """Mixin before a family's `PreTrainedModel`: what it loads and saves in 16 bits is told."""

    @classmethod
    def _load_pretrained_model(cls, model, state_dict, checkpoint_files, *args, **kwargs):
        warn_of_narrow(dtypes_in(state_dict, checkpoint_files))
        load: Any = super()._load_pretrained_model
        return load(model, state_dict, checkpoint_files, *args, **kwargs)

    def save_pretrained(self, save_directory, *args, **kwargs):
        """As Transformers' own."""
        state = kwargs.get("state_dict") or dict(self.named_parameters())
        warn_of_narrow({name: tensor.dtype for name, tensor in state.items()})
        super().save_pretrained(save_directory, *args, **kwargs)


def warn_of_narrow(dtypes: dict[str, torch.dtype]) -> None:
    """Say so, once, when parameters of connections have 16 bits or fewer.

    dtypes: of each parameter, by its name.
    """
    found = {dtype for name, dtype in dtypes.items() if is_of_connection(name) and dtype.is_floating_point}
    if narrow := sorted(str(dtype).removeprefix("torch.") for dtype in found if dtype.itemsize < 4):
        logger.warning_once(
            f"There are connections in {', '.join(narrow)}, where 1.003 is 1: coefficients are rounded, and small "
            f"steps of training are lost. Load them by from_pretrained, which keeps float32. With DeepSpeed train by "
            f'HCTrainer, or put "torch_autocast": {{"enabled": true, "dtype": "bfloat16"}} in its config instead of '
            f'"bf16". Merge models in float32.'
        )


def warn_of_training(layers: Iterable[Any]) -> None:
    """Say so, once, when the layers that a forward will run can't learn all that they should.

    It looks at one layer, as what casts or freezes does so to all.
    """
    if torch.compiler.is_compiling():
        return
    of_streams = [layer for layer in layers if hasattr(layer, "sub_layers")]
    if not of_streams:
        return
    first, last = of_streams[0], of_streams[-1]
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
