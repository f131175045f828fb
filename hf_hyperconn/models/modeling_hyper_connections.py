# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""What every hyper-connection model shares.

The streams live between the first and the last decoder layer: the first expands the embeddings into them and the last
reads them out, so that the rest of a Transformers model never meets them.
"""

from contextlib import contextmanager
from functools import wraps

import torch
from transformers import AutoConfig
from transformers import initialization as init
from transformers.utils import logging

from .hyper_connections import HyperConnection, expand_streams, reduce_streams

logger = logging.get_logger(__name__)


class HyperConnectionDecoderLayer:
    """Mixin before a family's Pre-Norm decoder layer: its two residual additions become hyper-connections.

    `output_projections` names the modules that write to the residual stream. A family whose branches are not
    norm + attention and norm + MLP under the usual names overrides `attention_branch` and `mlp_branch`.
    """

    output_projections = ("self_attn.o_proj", "mlp.down_proj")

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.config = config
        self.layer_idx = layer_idx
        self.attn_hc = self.make_connection(2 * layer_idx)
        self.mlp_hc = self.make_connection(2 * layer_idx + 1)
        for name in self.output_projections:
            self.get_submodule(name).hc_init_scale = config.hc_mult**-0.5

    def make_norm(self) -> torch.nn.Module:
        """A new norm of the family's own kind and width, for the prediction of DHC's coefficients."""
        return type(self.input_layernorm)(self.config.hidden_size, eps=self.config.rms_norm_eps)

    def make_connection(self, sub_layer: int) -> HyperConnection:
        """The connection around sub-layer k, as the config asks for."""
        return HyperConnection(
            self.config.hidden_size,
            self.config.hc_mult,
            sub_layer,
            norm=self.make_norm() if self.config.connection == "dhc" else None,
            tanh=self.config.hc_tanh,
        )

    def attention_branch(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """Norm and attention, `[B, S, D]` to `[B, S, D]`."""
        return self.self_attn(hidden_states=self.input_layernorm(hidden_states), **kwargs)[0]

    def mlp_branch(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Norm and MLP, `[B, S, D]` to `[B, S, D]`."""
        return self.mlp(self.post_attention_layernorm(hidden_states))

    def forward(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        """One decoder layer on streams `[B, S, N, D]`; the first takes and the last returns `[B, S, D]`."""
        is_first, is_last = self.layer_idx == 0, self.layer_idx == self.config.num_hidden_layers - 1
        streams = expand_streams(hidden_states, self.config.hc_mult) if is_first else hidden_states

        branch_input, carry = self.attn_hc.width_connection(streams)
        branch_output = self.attention_branch(branch_input, **kwargs)
        streams = self.attn_hc.depth_connection(carry, branch_output)

        branch_input, carry = self.mlp_hc.width_connection(streams)
        branch_output = self.mlp_branch(branch_input)
        streams = self.mlp_hc.depth_connection(carry, branch_output)

        return reduce_streams(streams, self.config.hc_readout) if is_last else streams


class HyperConnectionPreTrainedModel:
    """Mixin before a family's `PreTrainedModel`.

    `auto_map` names the class behind every Auto class, as `file.Class`: a saved model ships these files.
    """

    auto_map: dict[str, str]
    _keep_in_fp32_modules_strict = ["attn_hc", "mlp_hc"]
    _pp_plan = None

    def post_init(self):
        # the base's own __init__ has collected the layer classes of the modules that were replaced since
        self.__dict__.pop("_no_split_modules", None)
        super().post_init()

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, HyperConnection):
            for name, value in module.initial_values().items():
                init.copy_(getattr(module, name), value)
        elif (scale := getattr(module, "hc_init_scale", None)) is not None:
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range * scale)

    def save_pretrained(self, save_directory, **kwargs):
        """As Transformers' own; the config names every Auto class, so that the folder loads without this package."""
        self.config.auto_map = dict(self.auto_map)
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
        """Load a Pre-Norm checkpoint as this class, with hyper-connections at the equivalent initialisation.

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
        missing = sorted(key for key in info["missing_keys"] if "attn_hc." not in key and "mlp_hc." not in key)
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
        return (model, info) if with_info else model


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
                reduce_streams(state, self.config.hc_readout) if state is not None and state.dim() == 4 else state
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
