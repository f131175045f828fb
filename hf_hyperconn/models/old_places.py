# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""A warning for connections that depend on their place, in a model whose layers were removed or moved."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers.utils import logging

logger = logging.get_logger(__name__)

BY_PLACE = ("selected", "opens_block", "alpha")  # attributes of AltUp, attention residuals and Keel that follow from k


def warn_of_old_places(model: nn.Module) -> None:
    """Warn of removed or moved layers, where the model, loaded again, computes something else."""
    for layers in model.modules():
        if isinstance(layers, nn.ModuleList):
            _warn_of_old_places(layer for layer in layers if hasattr(layer, "make_connection"))


def _warn_of_old_places(layers: Iterable[Any]) -> None:
    connections = [(layer, getattr(layer, part.connection)) for layer in layers for part in layer.parts]
    for k, (layer, connection) in enumerate(connections):
        if any(hasattr(connection, name) for name in BY_PLACE):
            with torch.device("meta"):
                new = layer.make_connection(k, len(connections))
            if any(getattr(connection, name, None) != getattr(new, name, None) for name in BY_PLACE):
                logger.warning(
                    f"sub-layer {connection.sub_layer} is sub-layer {k} of {len(connections)} now, as layers have "
                    f"been removed or moved, and this kind of connection computes something else there: what is "
                    f"saved, loaded again, will not be this model. Train it on from there, or keep all layers."
                )
                return
