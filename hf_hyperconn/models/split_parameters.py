# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Parameters that DeepSpeed's ZeRO-3 has split over ranks, of which a module holds empty ones between its forwards."""

import sys
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


def whole(parameters: Iterable[torch.Tensor], changes: bool = False) -> AbstractContextManager:
    """Make parameters whole within a context; every rank has to enter it.

    changes: whether they are changed within; each rank then has the values of the first rank.
    """
    split = [parameter for parameter in parameters if hasattr(parameter, "ds_shape")]
    if not split:
        return nullcontext()
    deepspeed: Any = sys.modules["deepspeed"]  # which has split them
    return deepspeed.zero.GatheredParameters(split, modifier_rank=0 if changes else None)
