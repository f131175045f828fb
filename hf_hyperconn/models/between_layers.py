# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""What a base model does to its residual stream between its layers, done to several streams."""

from functools import wraps

import torch


def for_every_stream(method):
    """Do to every residual stream alike what a base model's `method` does to its one between layers.

    The result raises `ValueError` where there are values of sub-layers instead of streams.
    """

    @wraps(method)
    def wrapper(self, hidden_states, *args, **kwargs):
        if not self.layer_classes[0].are_streams(hidden_states):
            return method(self, hidden_states, *args, **kwargs)
        if self.config.connection == "attnres":
            raise ValueError(
                f"{type(self).__name__}.{method.__name__} adds to residual streams, and connection 'attnres' has "
                f"none. Convert with another."
            )
        if hidden_states.shape[-1] < self.config.hidden_size:  # parts of one stream
            whole = method(self, hidden_states.flatten(-2), *args, **kwargs)
            return whole.unflatten(-1, hidden_states.shape[-2:])
        return torch.stack([method(self, stream, *args, **kwargs) for stream in hidden_states.unbind(-2)], dim=-2)

    return wrapper
