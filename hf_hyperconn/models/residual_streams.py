# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""What a base model does to its residual stream outside of its layers, done to several streams."""

from functools import wraps
from inspect import unwrap

import torch

from .float32_connections import warn_of_training
from .hyper_connections_layer import place_layers


def reduce_recorded_streams(forward):
    """Make the `hidden_states` that a base model's `forward` records `[B, S, D]`, by the model's own readout.

    The result raises `ValueError` when the layers are such that they can't be read out.
    """

    # most loop over `self.layers[: self.config.num_hidden_layers]`, some over all of the layers
    names_count = "num_hidden_layers" in unwrap(forward).__code__.co_names

    @wraps(forward)
    def wrapper(self, *args, **kwargs):
        return_dict = kwargs.pop("return_dict", None)
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        may_exit_early = names_count and self.layer_classes[0].count == "num_hidden_layers"
        self.keep_every_layer()
        place_layers(self.decoder_layers, self.config, self.config.num_hidden_layers if may_exit_early else None)
        warn_of_training(self.decoder_layers)
        outputs = forward(self, *args, return_dict=True, **kwargs)
        are_streams = self.layer_classes[0].are_streams
        if are_streams(outputs[0]):
            raise ValueError(
                "no decoder layer has read the streams out: the last one is inside a wrapper, or something else "
                "stands in its place. Remove it from the list of layers, and wrap layers after that. Stages of a "
                "pipeline end so, too: use tensor parallelism instead."
            )
        if outputs.get("hidden_states") is not None:
            outputs["hidden_states"] = tuple(
                self.decoder_layers[-1].read_out(state) if state is not None and are_streams(state) else state
                for state in outputs["hidden_states"]
            )
        return outputs if return_dict else outputs.to_tuple()

    return wrapper


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
