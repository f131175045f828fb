# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""A decoder layer on residual streams, and the forward of a base model around its layers."""

from collections.abc import Callable
from functools import wraps
from inspect import unwrap
from typing import TYPE_CHECKING, Any

import torch
import transformers
from torch import nn
from transformers.utils import logging

from .chosen_code import CONNECTIONS, readout_maker, replace_norms
from .connection import Connection, Written
from .connection_weights import InitializedModule, fresh_copy, warn_of_training
from .sub_layers import SUB_LAYERS, SubLayer, written_streams

logger = logging.get_logger(__name__)

# the weights that write to the residual stream, by the ends of their paths in a layer
OUTPUT_PROJECTIONS = (
    *("o_proj", "down_proj", "out_proj", "c_proj", "fc2", "fc_out", "dense", "dense_4h_to_h", "w2", "Wo"),
    *("output_linear", "linear_out", "o", "wo", "ffn.2", "projection_layer", "attn.proj", "per_layer_projection"),
)
INSIDE_A_BRANCH = ("norm", "intermediate.")  # in the paths of weights of the same names that write nothing there

if TYPE_CHECKING:
    Base = nn.Module
else:
    Base = object


class HyperConnectionDecoderLayer(Base):
    """Mixin before a family's decoder layer: its residual additions become hyper-connections.

    The branches here are norm + attention and norm + MLP. A family with other branches has methods cut from
    Transformers' `forward`. A branch accepts the layer's arguments, and values that earlier branches return beside
    their outputs.

    parts: the sub-layers of the layer, in their order.
    count: field of the config with the number of layers.
    positional: names of the arguments, besides hidden states, that the family's model passes by their place.
    packed: whether hidden states are `[S, D]`, tokens of all sequences one after the other, and streams `[S, N, D]`.
    channels_first: whether the base's hidden states lie channel after channel in memory, by which norms round.
    widened: attribute of the layer that tells whether streams are float32; None for the hidden states' dtype.
    returned: names of the values that the layer returns after hidden states, in a tuple; None for no tuple.
    settings: fields of the config with the values that lead to these branches.
    absent: arguments that must be None, because their branch is not in this layer.
    cut_from: the `CutFrom` of cut branches; None without any.
    cache_names: names of the cache in the model and in the branches; None if they are the same.
    predicting_norm: the norm of the layer whose copy predicts dynamic coefficients; None for torch's RMSNorm.
    is_first, is_last: whether its `forward` expands the streams and reads them out; `place_layers` sets them.
    """

    input_layernorm: Any
    self_attn: Any
    post_attention_layernorm: Any
    mlp: Any

    parts: tuple[SubLayer, ...] = SUB_LAYERS
    count = "num_hidden_layers"
    positional: tuple[str, ...] = ()
    packed = False
    channels_first = False
    widened: str | None = None
    returned: tuple[str, ...] | None = None
    settings: dict[str, object] = {}
    absent: tuple[str, ...] = ()
    cut_from: Any = None
    cache_names: tuple[str, str] | None = None
    predicting_norm: str | None = "post_attention_layernorm"
    hc_head: InitializedModule
    embedding_scale: InitializedModule
    lent_readout: tuple[InitializedModule, ...] = ()  # in a tuple, so that its parameters keep the one name they have

    def add_connections(self, config, layer_idx: int, layers: int) -> None:
        """Add connections to a layer that the family's `__init__` has built.

        layers: number of layers.

        Raises `ValueError` when the layer has other branches with this config. Raises `ImportError` when the installed
        Transformers has another layer than the branches were cut from.
        """
        self.check_settings(config)
        if self.cut_from is not None:
            self.cut_from.fit(self, super().forward, transformers.__version__)
        if config.connection in ("shc", "dhc"):
            self._mark_output_projections()
        self.config, self.layer_idx = config, layer_idx
        self.is_first, self.is_last = layer_idx == 0, layer_idx == layers - 1
        replace_norms(self, config)
        for place, part in enumerate(self.parts):
            connection = self.make_connection(len(self.parts) * layer_idx + place, len(self.parts) * layers)
            setattr(self, part.connection, connection)
        if self.is_last and (make_readout := readout_maker(config)) is not None:
            self.hc_head = make_readout(self)

    @classmethod
    def check_settings(cls, config) -> None:
        """Refuse a config with which the family's layer has other branches."""
        for name, value in cls.settings.items():
            if (other := getattr(config, name)) != value:
                raise ValueError(
                    f"{name} is {other!r}, with which the layer is another one: {cls.__name__} stands for that with "
                    f"{name}={value!r}."
                )

    def _mark_output_projections(self) -> None:
        """Mark the weights that start smaller with static and dynamic hyper-connections, as in their paper."""
        ends = tuple(f".{end}" for end in OUTPUT_PROJECTIONS)
        for path, _ in list(self.named_parameters()):
            owner, _, name = path.rpartition(".")
            if f".{path.removesuffix('.weight')}".endswith(ends) and not any(part in path for part in INSIDE_A_BRANCH):
                module: Any = self.get_submodule(owner)
                module.hc_output_projection, module.hc_is_scaled = name, False

    def make_norm(self) -> nn.Module:
        """Return a new norm of the family's own kind, for the prediction of DHC's coefficients."""
        if self.predicting_norm is None:
            return nn.RMSNorm(self.config.hidden_size, eps=self.config.hc_eps)
        return fresh_copy(getattr(self, self.predicting_norm))

    def make_connection(self, sub_layer: int, sub_layers: int) -> Connection:
        """Return a new connection around sub-layer k, of the config's kind."""
        return CONNECTIONS[self.config.connection](self, sub_layer, sub_layers)

    def written_streams(self, sub_layer: int, sub_layers: int) -> tuple[int, ...] | None:
        """Return the streams that sub-layer k writes at the history start; None for another start."""
        config = self.config
        if config.hc_start != "history":
            return None
        return written_streams(sub_layer, sub_layers, config.hc_mult, config.hc_history, len(self.parts))

    @property
    def sub_layers(self) -> list[tuple[Connection, Callable[..., torch.Tensor]]]:
        """Return the connection and the branch of each sub-layer, in their order."""
        return [(getattr(self, part.connection), getattr(self, part.branch)) for part in self.parts]

    @classmethod
    def are_streams(cls, states: torch.Tensor) -> bool:
        """Tell whether states are streams, not hidden states."""
        return states.dim() == (3 if cls.packed else 4)

    def read_out(self, streams: torch.Tensor) -> torch.Tensor:
        """Read hidden states `[B, S, D]` out of streams, by the readout of the config."""
        if readout_maker(self.config) is not None:
            return (self.lent_readout[0] if self.lent_readout else self.hc_head)(streams)
        return self.sub_layers[-1][0].reduce_streams(streams, self.config.hc_readout)

    def expand(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return the first streams, `[B, S, N, D]`, of hidden states `[B, S, D]`."""
        if self.config.norm is not None:
            hidden_states = self.embedding_scale(hidden_states)
        return self.sub_layers[0][0].expand_streams(self._widen(hidden_states))

    def with_base_layout(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return hidden states `[B, S, D]` with the base's strides."""
        return hidden_states.mT.contiguous().mT if self.channels_first else hidden_states

    def attention_branch(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """Apply norm and attention, `[B, S, D]` to `[B, S, D]`."""
        return self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]

    def mlp_branch(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """Apply norm and MLP, `[B, S, D]` to `[B, S, D]`."""
        return self.mlp(self.post_attention_layernorm(hidden_states))

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> Any:
        """Run the layer on streams `[B, S, N, D]`; the first layer accepts and the last returns `[B, S, D]`.

        It returns a tuple where the family's layer does.
        """
        self._name_arguments(args, kwargs)
        sub_layers = self.sub_layers
        streams = self._take(hidden_states, sub_layers[0][0])

        for part, (connection, branch) in zip(self.parts, sub_layers, strict=True):
            if part.given is not None and kwargs.get(part.given) is None:
                continue
            branch_input, carry = connection(streams)
            branch_output = branch(self.with_base_layout(branch_input), **kwargs)
            if isinstance(branch_output, tuple):
                branch_output, values = branch_output
                kwargs.update(values)
            streams = carry.write(branch_output)
            if part.after is not None:
                streams = connection.take(getattr(self, part.after)(streams.written()))

        hidden_states = streams.written()
        hidden_states = self.with_base_layout(self.read_out(hidden_states)) if self.is_last else hidden_states
        return hidden_states if self.returned is None else (hidden_states, *map(kwargs.get, self.returned))

    def _name_arguments(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Add positional arguments to `kwargs`, and rename the cache for the branches."""
        if len(args) > len(self.positional):
            raise TypeError(
                f"decoder layer {self.layer_idx} received {len(args)} arguments by their place besides hidden states, "
                f"but takes {', '.join(self.positional) or 'none'} so. Give the others by name."
            )
        kwargs.update(zip(self.positional, args, strict=False))
        if self.cache_names is not None and self.cache_names[0] in kwargs:
            kwargs[self.cache_names[1]] = kwargs.pop(self.cache_names[0])
        if given := [name for name in self.absent if kwargs.get(name) is not None]:
            raise ValueError(
                f"decoder layer {self.layer_idx} received {', '.join(given)}, for which it has no hyper-connection. "
                f"Leave that out."
            )

    def _take(self, hidden_states: torch.Tensor, connection: Connection) -> Written:
        """Return the input of the layer's first connection; the first layer expands hidden states."""
        if self.are_streams(hidden_states):  # also in a first layer that stands further up once more
            return connection.take(self._widen(hidden_states))
        if not self.is_first:
            raise ValueError(
                f"decoder layer {self.layer_idx} received hidden states of shape {tuple(hidden_states.shape)}, but "
                f"takes the streams [batch, sequence, streams, size] of the layer before it. Stages made by "
                f"a tool exchange hidden states: use pipeline_stages or tensor parallelism instead."
            )
        return connection.take(self.expand(hidden_states))

    def _widen(self, states: torch.Tensor) -> torch.Tensor:
        """Return hidden states or streams, in float32 where the layer's streams are float32."""
        return states.to(torch.float32) if self.widened is not None and getattr(self, self.widened) else states


class BetweenEnds:
    """The compiled code of one layer, between expanding and reading out.

    The compiler makes a graph for each layer that does something else. With both outside, all layers share one.

    layer: the decoder layer.
    compiled: its compiled code, of `layer.compile()` or `torch.compile(layer)`.
    expands, reads_out: whether the layer is the first and the last of its stack; `place_layers` sets them.
    """

    def __init__(self, layer: HyperConnectionDecoderLayer, compiled: Callable):
        self.layer, self.compiled = layer, compiled
        self.expands = self.reads_out = False

    def __call__(self, hidden_states: torch.Tensor, *args, **kwargs) -> Any:
        """Run the layer on hidden states or streams, as its `forward` does, by a graph for contiguous streams."""
        layer = self.layer
        if self.expands and not layer.are_streams(hidden_states):
            hidden_states = layer.expand(hidden_states).contiguous()
        outputs = self.compiled(hidden_states, *args, **kwargs)
        streams, *others = (outputs,) if layer.returned is None else outputs
        if not self.reads_out or not layer.are_streams(streams):
            return outputs
        read = layer.with_base_layout(layer.read_out(streams))
        return read if layer.returned is None else (read, *others)


def compiled_alone(layer: Any) -> BetweenEnds | None:
    """Return the compiled code of a layer that is compiled apart from its model; None for another."""
    wrapped = getattr(layer, "_orig_mod", None)  # by torch.compile
    place = "_compiled_call_impl" if wrapped is None else "forward"
    compiled = getattr(layer, place)
    if compiled is not None and not isinstance(compiled, BetweenEnds):
        compiled = BetweenEnds(layer if wrapped is None else wrapped, compiled)
        setattr(layer, place, compiled)
    return compiled


def place_layers(layers: nn.ModuleList, config, count: int | None = None, are_recorded: bool = False) -> None:
    """Mark the first and the last of the layers that run now: layers may have been removed or added.

    Layers that are compiled one by one share a graph, because `BetweenEnds` expands and reads out. Three cases keep
    both in `forward`: parameters, which hooks may provide only for `forward`; recorded hidden states; and compilation
    of the whole model, which calls `forward`.

    count: the number of layers that run; None for all. An early exit runs fewer.
    are_recorded: whether hooks record the hidden states of layers.

    Raises `ValueError` when no layer can expand the streams, or read them out once.
    """
    running: list[Any] = list(layers)[:count]
    if not running:
        return
    first, last = running[0], running[-1]
    if any(layer is last for layer in running[:-1]):
        raise ValueError(
            "the last decoder layer stands at an earlier place, too, where it may not read the streams out. Put a "
            "copy (copy.deepcopy) of the layer in one of the places."
        )
    if config.norm is not None and hasattr(first, "is_first") and not hasattr(first, "embedding_scale"):
        raise ValueError(
            "the first decoder layer present has no embedding_scale: that was in a layer that has been removed. "
            "Set `embedding_scale` of the layer to that module."
        )
    readout = getattr(layers[-1], "hc_head", None)
    if readout_maker(config) is not None and hasattr(last, "is_last") and readout is None:
        raise ValueError(
            "the last decoder layer present has no readout: that was in a layer that has been removed. "
            "Set `hc_head` of the layer to that module."
        )
    outside = not are_recorded and not torch.compiler.is_compiling()
    for layer in running:
        if not hasattr(layer, "is_first"):
            continue  # something that passes the streams on
        expands, reads_out = layer is first, layer is last
        if (compiled := compiled_alone(layer)) is not None:
            compiled.expands = expands and outside and config.norm is None
            compiled.reads_out = reads_out and outside and readout_maker(config) is None
            expands, reads_out = expands and not compiled.expands, reads_out and not compiled.reads_out
        if layer.is_first != expands:
            layer.is_first = expands
        if layer.is_last != reads_out:
            layer.is_last = reads_out
    lent = () if readout is None or last is layers[-1] else (readout,)
    if getattr(last, "lent_readout", lent) != lent:
        last.lent_readout = lent


def reduce_recorded_streams(forward):
    """Wrap a base model's `forward`, so that recorded `hidden_states` are read out, to `[B, S, D]`.

    The wrapper raises `ValueError` when no layer has read the streams out.
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
        count = self.config.num_hidden_layers if may_exit_early else None
        are_recorded = bool(kwargs.get("output_hidden_states", getattr(self.config, "output_hidden_states", False)))
        place_layers(self.decoder_layers, self.config, count, are_recorded)
        warn_of_training(self.decoder_layers)
        outputs = forward(self, *args, return_dict=True, **kwargs)
        are_streams = self.layer_classes[0].are_streams
        if are_streams(outputs[0]):
            raise ValueError(
                "no decoder layer has read the streams out: the last one is inside a wrapper, or something else "
                "stands in its place. Remove it from the list of layers, and wrap layers after that. Stages made "
                "by a tool end so, too: use pipeline_stages or tensor parallelism instead."
            )
        if outputs.get("hidden_states") is not None:
            outputs["hidden_states"] = tuple(
                self.decoder_layers[-1].read_out(state) if state is not None and are_streams(state) else state
                for state in outputs["hidden_states"]
            )
        return outputs if return_dict else outputs.to_tuple()

    return wrapper


def for_every_stream(method):
    """Wrap a base model's `method` between layers, so that it changes every residual stream alike.

    The wrapper raises `ValueError` for attention residuals, which have values of sub-layers instead of streams.
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
