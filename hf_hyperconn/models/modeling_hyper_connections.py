# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""What every hyper-connection model shares.

The streams live between the first and the last decoder layer: the first expands the embeddings into them and the last
reads them out, so that the rest of a Transformers model never meets them.
"""

import re
from contextlib import contextmanager
from copy import deepcopy
from functools import wraps

import torch
from torch import nn
from transformers import AutoConfig, AutoModel, PreTrainedModel
from transformers import initialization as init
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming, WeightTransform
from transformers.utils import logging

from .dynamic_activations import EmbeddingScale, replace_norms
from .frac_connections import FracConnection, narrow_norm
from .hyper_connections import Connection, HyperConnection, InitialisedModule
from .keel_connection import KeelConnection
from .manifold_hyper_connections import LearnedReadout, ManifoldHyperConnection

# the modules that a decoder layer has besides its base's
ADDED = ("attn_hc", "mlp_hc", "hc_head")


def is_of_connection(name: str) -> bool:
    """Whether a parameter's name is that of a hyper-connection or of the learned readout."""
    return not set(ADDED).isdisjoint(name.split("."))


class HyperConnectionDecoderLayer:
    """Mixin before a family's decoder layer: its two residual additions become hyper-connections.

    A branch is whatever the family computes between reading the residual stream and adding to it. Here it is norm +
    attention and norm + MLP; a family whose branches are something else overrides `attention_branch` or `mlp_branch`.
    `output_projections` are the names of the weights that write to the residual stream: static and dynamic
    hyper-connections start them smaller, as their paper does.
    """

    output_projections = ("o_proj", "down_proj")

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        if config.connection in ("shc", "dhc"):
            self._mark_output_projections()
        self.config = config
        self.layer_idx = layer_idx
        replace_norms(self, config)
        if config.norm is not None and layer_idx == 0:
            self.embedding_scale = EmbeddingScale(config.hidden_size)
        self.attn_hc = self.make_connection(2 * layer_idx)
        self.mlp_hc = self.make_connection(2 * layer_idx + 1)
        if config.hc_readout == "learned" and layer_idx == config.num_hidden_layers - 1:
            self.hc_head = LearnedReadout(config.hidden_size, config.hc_mult, config.hc_eps)

    def _mark_output_projections(self) -> None:
        for path, _ in list(self.named_parameters()):
            owner, _, name = path.rpartition(".")
            if path.removesuffix(".weight").rpartition(".")[2] in self.output_projections:
                self.get_submodule(owner).hc_output_projection = name

    def make_norm(self) -> nn.Module:
        """A new norm of the family's own kind, for the prediction of DHC's coefficients."""
        return deepcopy(self.post_attention_layernorm)

    def make_connection(self, sub_layer: int) -> Connection:
        """The connection around sub-layer k, as the config asks for."""
        config = self.config
        size, n = config.hidden_size, config.hc_mult
        match config.connection:
            case "shc":
                return HyperConnection(size, n, sub_layer)
            case "dhc":
                return HyperConnection(size, n, sub_layer, norm=self.make_norm(), tanh=config.hc_tanh)
            case "frac":
                norm = narrow_norm(self.make_norm(), size // n)
                return FracConnection(size, n, sub_layer, norm=norm, tanh=config.hc_tanh)
            case "keel":
                return KeelConnection(size, sub_layer, 2 * config.num_hidden_layers, norm=self.make_norm())
            case "mhc" | "ihc" as name:
                return ManifoldHyperConnection(
                    size, n, sub_layer, mixes=name == "mhc", sinkhorn_iters=config.hc_sinkhorn_iters, eps=config.hc_eps
                )

    def read_out(self, streams: torch.Tensor) -> torch.Tensor:
        """Hidden states `[B, S, D]` of streams, by the readout of the config."""
        if self.config.hc_readout == "learned":
            return self.hc_head(streams)
        return self.mlp_hc.reduce_streams(streams, self.config.hc_readout)

    def attention_branch(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """Norm and attention, `[B, S, D]` to `[B, S, D]`."""
        return self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]

    def mlp_branch(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norm and MLP, `[B, S, D]` to `[B, S, D]`."""
        return self.mlp(self.post_attention_layernorm(hidden_states))

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """One decoder layer on streams `[B, S, N, D]`; the first takes and the last returns `[B, S, D]`."""
        is_first, is_last = self.layer_idx == 0, self.layer_idx == self.config.num_hidden_layers - 1
        if not is_first and hidden_states.dim() != 4:
            raise ValueError(
                f"decoder layer {self.layer_idx} received hidden states of shape {tuple(hidden_states.shape)}, but "
                f"takes the streams [batch, sequence, streams, size] of the layer before it. Stages of a pipeline "
                f"exchange hidden states: use tensor parallelism instead."
            )
        if is_first and self.config.norm is not None:
            hidden_states = self.embedding_scale(hidden_states)
        streams = self.attn_hc.expand_streams(hidden_states) if is_first else hidden_states

        branch_input, carry = self.attn_hc(streams)
        branch_output = self.attention_branch(branch_input, **kwargs)
        branch_input, carry = self.mlp_hc.next_width_connection(self.attn_hc, carry, branch_output)
        branch_output = self.mlp_branch(branch_input)
        streams = self.mlp_hc.depth_connection(carry, branch_output)

        return self.read_out(streams) if is_last else streams


class HyperConnectionPreTrainedModel:
    """Mixin before a family's `PreTrainedModel`.

    decoder_layer_class: the family's decoder layer on residual streams.
    heads: suffixes of the classes with a head; each belongs to the Auto class of that suffix.
    auto_map: `file.Class` behind every Auto class; a saved model ships these files.
    """

    decoder_layer_class: type[nn.Module]
    heads: tuple[str, ...]
    auto_map: dict[str, str]
    _pp_plan = None

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "decoder_layer_class" in vars(cls):
            cls._adopt_family(cls.__bases__[-1])
        elif cls.__module__.startswith("torch."):
            # FSDP2's, for one instance, whose code is that of the class it was made of
            cls.__module__ = cls.__bases__[-1].__module__

    @classmethod
    def _adopt_family(cls, base: type[PreTrainedModel]):
        """Take over what Transformers looks up by class or model type, which the family says of its own classes."""
        name, model_type = cls.config_class.__name__.removesuffix("Config"), cls.config_class.model_type
        cls.auto_map = {
            "AutoConfig": f"configuration_{model_type}.{name}Config",
            "AutoModel": f"modeling_{model_type}.{name}Model",
            **{f"AutoModel{suffix}": f"modeling_{model_type}.{name}{suffix}" for suffix in cls.heads},
        }
        cls._no_split_modules = [cls.decoder_layer_class.__name__]
        cls._can_record_outputs = {**(base._can_record_outputs or {}), "hidden_states": cls.decoder_layer_class}
        cls._keep_in_fp32_modules_strict = [*(base._keep_in_fp32_modules_strict or ()), "attn_hc", "mlp_hc"]
        # found by searching the source file of the class, which here is not the family's
        cls._can_set_experts_implementation_cached_value = base._can_set_experts_implementation()
        if (mapping := get_checkpoint_conversion_mapping(cls.config_class.base_model_type)) is not None:
            register_checkpoint_conversion_mapping(model_type, list(map(_with_literal_dots, mapping)), overwrite=True)

    def post_init(self):
        # the base's own __init__ has collected the layer classes of the modules that were replaced since
        self.__dict__.pop("_no_split_modules", None)
        if self.config.hc_readout == "learned":
            self._keep_in_fp32_modules_strict = {*self._keep_in_fp32_modules_strict, "hc_head"}
        self.add_model_tags(["hyper-connections", "hf-hyperconn", f"hc-x{self.config.hc_mult}"])
        super().post_init()

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, InitialisedModule):
            for name, value in module.initial_values().items():
                parameter = getattr(module, name)
                init.copy_(parameter, _sharded_like(value, parameter))
        elif (name := getattr(module, "hc_output_projection", None)) is not None:
            std = self.config.initializer_range * self.config.hc_mult**-0.5
            init.normal_(getattr(module, name), mean=0.0, std=std)

    def materialise_connections(self, device: torch.device) -> None:
        """Create and initialise what hyper-connections have on the meta device, where loading leaves new weights."""
        for module in self.modules():
            if isinstance(module, InitialisedModule) and any(p.is_meta for p in module.parameters()):
                module.to_empty(device=device)
                module.apply(self._init_weights)

    @classmethod
    def prepare_distribute_model(cls, distributed_config, **kwargs):
        """As Transformers' own, which reads `from_pretrained(distributed_config=...)`, but no pipeline.

        Raises `ValueError` when one is asked for.
        """
        sizes = distributed_config if isinstance(distributed_config, dict) else vars(distributed_config)
        if (sizes.get("pp_size") or 1) > 1:
            raise ValueError(
                f"pp_size={sizes['pp_size']} was asked for. Transformers' pipeline hands [batch, sequence, hidden] on "
                f"from stage to stage; between layers of {cls.__name__} there are [batch, sequence, streams, hidden]. "
                f"Use fsdp_size or tp_size."
            )
        return super().prepare_distribute_model(distributed_config, **kwargs)

    def set_stream_recomputation(self, every: int | str | None = "auto") -> None:
        """Keep fewer streams for the backward, and compute the others again from branch outputs, bit for bit.

        No branch runs twice: it costs a second pass over the streams, not a second forward. Not together with gradient
        checkpointing, which keeps no streams anyway, nor in compiled models, whose compiler decides what is kept.

        every: number of sub-layers from kept streams to kept streams, even; "auto", near sqrt(N L / (N + 2)) for L
            sub-layers, which needs the least memory (mHC paper, Eq. 20); or None, back to keeping those of each layer.

        Raises `ValueError` for another number, or for connections that are neither static nor dynamic ("shc", "dhc").
        """
        config = self.config
        if config.connection not in ("shc", "dhc"):
            raise ValueError(
                f"streams of connection {config.connection!r} can't be recomputed, those of 'shc' and 'dhc' can."
            )
        if every == "auto":
            n, sub_layers = config.hc_mult, 2 * config.num_hidden_layers
            every = max(2, 2 * round((n * sub_layers / (n + 2)) ** 0.5 / 2))
        if every is not None and (not isinstance(every, int) or every < 2 or every % 2):
            raise ValueError(f"every={every!r} was asked for; accepted are 'auto', None and even numbers from 2 up.")
        for module in self.modules():
            if isinstance(module, HyperConnection):
                module.keeps_streams = None if every is None else module.sub_layer % every == 0

    def save_pretrained(self, save_directory, **kwargs):
        """As Transformers' own; the config names every Auto class, so that the folder loads without this package."""
        self.config.auto_map = dict(self.auto_map)
        with without_fsdp_prefix(type(self)):
            super().save_pretrained(save_directory, **kwargs)

    @classmethod
    def from_prenorm(
        cls,
        pretrained_model_name_or_path,
        *,
        hc_mult: int = 4,
        connection: str = "dhc",
        hc_tanh: bool = True,
        hc_readout: str = "mean",
        **kwargs,
    ):
        """Load a base checkpoint as this class, with hyper-connections at the equivalent initialisation.

        The result computes the same logits as the base, bit for bit (with the mean readout).

        pretrained_model_name_or_path: a local folder or a Hub id.
        hc_mult, connection, hc_tanh, hc_readout: see `HyperConnectionConfig`.
        kwargs: as for `from_pretrained` (`dtype`, `device_map`, `revision`, ...).

        Raises `ValueError` when the checkpoint belongs to another family, does not hold all of the base's weights or
        would be offloaded to disk.
        """
        hub = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
        base_config = kwargs.pop("config", None) or AutoConfig.from_pretrained(
            pretrained_model_name_or_path, **{name: kwargs[name] for name in hub if name in kwargs}
        )
        config = cls.config_class.from_prenorm(
            base_config, hc_mult=hc_mult, connection=connection, hc_tanh=hc_tanh, hc_readout=hc_readout
        )
        with_info = kwargs.pop("output_loading_info", False)
        # the loading report would name the hyper-connections as missing; the check below says what matters
        verbosity = logging.get_verbosity()
        logging.set_verbosity_error()
        try:
            model, info = cls.from_pretrained(
                pretrained_model_name_or_path, config=config, output_loading_info=True, **kwargs
            )
        finally:
            logging.set_verbosity(verbosity)
        missing = sorted(key for key in info["missing_keys"] if not is_of_connection(key))
        if missing:
            raise ValueError(
                f"{pretrained_model_name_or_path!r} holds no weights for {', '.join(missing[:3])}"
                f"{f' and {len(missing) - 3} more' if len(missing) > 3 else ''}, which {cls.__name__} needs. "
                f"Load it with the class it was saved from."
            )
        if "disk" in getattr(model, "hf_device_map", {}).values():
            raise ValueError(
                "part of the model would be offloaded to disk, where its new hyper-connections are not. "
                "Save a conversion first (hf-hyperconn convert) and load that."
            )
        model.materialise_connections(model.device)
        return (model, info) if with_info else model


class HyperConnectionModel:
    """Mixin before a family's base model: its decoder layers work on residual streams.

    The family's `forward` stays, inside `reduce_recorded_streams`.
    """

    def __init__(self, config):
        with no_decoder_layers(config):
            super().__init__(config)
        replace_norms(self, config)
        self.layers = nn.ModuleList(self.decoder_layer_class(config, i) for i in range(config.num_hidden_layers))
        self.post_init()


class HyperConnectionHead:
    """Mixin before a family's class with a head: its base model is `model_class`."""

    model_class: type[PreTrainedModel]

    def __init__(self, config):
        # some heads ask AutoModel for their base; the file of this config may have been loaded more than once
        if type(config).__name__ == self.model_class.config_class.__name__:
            AutoModel.register(type(config), self.model_class, exist_ok=True)
        with no_decoder_layers(config):
            super().__init__(config)
        setattr(self, self.base_model_prefix, self.model_class(config))
        self.post_init()


def reduce_recorded_streams(forward):
    """Make the `hidden_states` that a base model's `forward` records `[B, S, D]`, by the model's own readout."""

    @wraps(forward)
    def wrapper(self, *args, **kwargs):
        return_dict = kwargs.pop("return_dict", None)
        if return_dict is None:
            return_dict = getattr(self.config, "return_dict", True)
        outputs = forward(self, *args, return_dict=True, **kwargs)
        if outputs.get("hidden_states") is not None:
            outputs["hidden_states"] = tuple(
                self.layers[-1].read_out(state) if state is not None and state.dim() == 4 else state
                for state in outputs["hidden_states"]
            )
        return outputs if return_dict else outputs.to_tuple()

    return wrapper


@contextmanager
def no_decoder_layers(config):
    """Let a base class's `__init__` build everything but decoder layers, which the caller adds.

    A request for gradient checkpointing, which `post_init` takes out of the config, waits for those layers.
    """
    num_hidden_layers, config.num_hidden_layers = config.num_hidden_layers, 0
    waiting = {name: config.__dict__.pop(name) for name in ("gradient_checkpointing",) if name in config.__dict__}
    try:
        yield
    finally:
        config.num_hidden_layers = num_hidden_layers
        config.__dict__.update(waiting)


@contextmanager
def without_fsdp_prefix(cls: type):
    """Within it, the class that FSDP2 makes for one instance has the name of the class that it was made of."""
    name, cls.__name__ = cls.__name__, cls.__name__.removeprefix("FSDP")
    try:
        yield
    finally:
        cls.__name__ = name


def _sharded_like(value: torch.Tensor, parameter: torch.Tensor) -> torch.Tensor:
    """The part of a value that each rank has of a parameter; all of it unless the parameter is sharded."""
    if not hasattr(parameter, "device_mesh"):
        return value
    from torch.distributed.tensor import distribute_tensor  # not part of every build of torch

    return distribute_tensor(value, parameter.device_mesh, parameter.placements)


def _with_literal_dots(transform: WeightTransform) -> WeightTransform:
    """The transform of checkpoint names, where a `.` in `.mlp.` no longer matches the `_` of `mlp_hc`."""
    if not isinstance(transform, WeightRenaming):
        return transform
    sides = (transform._original_source_patterns, transform._original_target_patterns)
    return WeightRenaming(*([re.sub(r"(?<!\\)\.(?![*+?])", r"\.", pattern) for pattern in side] for side in sides))
