"""Diffusion transformers of diffusers, such as DiT and PixArt, with hyper-connections.

`HC` before the name of a class of diffusers names the class with hyper-connections:

    from hf_hyperconn.diffusion import HCDiTTransformer2DModel

Its blocks are diffusers' own. Their branches are cut from the source of a block's `forward`, by its attributes. A
branch that computes the scales, shifts and gates of an adaptive norm hands them on to later branches.
"""

import inspect
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cache, wraps
from typing import Any

import diffusers
import torch
from diffusers import ModelMixin
from huggingface_hub.dataclasses import strict
from torch import nn
from transformers import PreTrainedConfig

from .errors import UnsupportedCheckpointError
from .families.family_source import Cut
from .families.reading.loops import read_layer_loop
from .in_memory.generic import cut_layer, layer_attributes
from .in_memory.running_code import running_code
from .models.configuration_hyper_connections import HyperConnectionConfig
from .models.connection_fields import FIELDS as OF_CONNECTIONS
from .models.connection_weights import (
    InitializedModule,
    fresh_copy,
    warn_of_narrow,
    warn_of_old_places,
    warn_of_training,
)
from .models.decoder_layer import HyperConnectionDecoderLayer, place_layers
from .models.sub_layers import READOUT, is_of_connection
from .wrappers import hooks_of

Base: Any = object  # the base of mixins; to type checkers any class

BLOCKS = "transformer_blocks"
FIELDS = {name: value for name, value in OF_CONNECTIONS.items() if not name.startswith("norm")}  # diffusers' own stay
# modules that diffusers loads in float32, whatever the dtype: names of connections in blocks
FLOAT32_MODULES = ("attn_hc", "mlp_hc", "attn1_hc", "attn2_hc", "ff_hc", READOUT)


class DiffusionConfig(HyperConnectionConfig, PreTrainedConfig):
    """The fields of `HyperConnectionConfig`, and the sizes of a model of diffusers."""

    hidden_size: int = 0
    num_hidden_layers: int = 0


class HyperConnectionBlock(HyperConnectionDecoderLayer):
    """Mixin before a block of diffusers.

    class_arguments: the arguments of `_block_class` for this class, which no module contains by name.
    """

    class_arguments: "tuple[type[nn.Module], Cut, int]"

    def __reduce_ex__(self, protocol):
        """Pickle and copy it by the arguments of its class."""
        return _empty_block, self.class_arguments, self.__getstate__()

    def make_norm(self) -> nn.Module:
        """Copy the block's first plain norm; return an RMSNorm where all norms depend on the time step."""
        norms = [module for module in self.children() if isinstance(module, nn.LayerNorm | nn.RMSNorm)]
        return fresh_copy(norms[0]) if norms else nn.RMSNorm(self.config.hidden_size, eps=self.config.hc_eps)

    def forward(self, hidden_states: torch.Tensor, *args, **kwargs) -> torch.Tensor:
        """Run the branches on streams, as `HyperConnectionDecoderLayer` does."""
        if self.is_first and hidden_states.shape[2:] != (self.config.hidden_size,):
            raise ValueError(
                f"the first block received hidden states of shape {tuple(hidden_states.shape)}, but takes "
                f"[batch, sequence, {self.config.hidden_size}]. Give it hidden states of that shape."
            )
        # patches are not contiguous, a base's sums are, and matrix products round by the layout of their input
        return super().forward(hidden_states.contiguous(), *args, **kwargs)


class HyperConnectionTransformer(Base):
    """Mixin before a transformer of diffusers: its blocks work on residual streams.

    Besides its base's arguments, it accepts the fields of hyper-connections by name, and keeps them in its config.

    hc_config_class: class of `hc_config`, which has these fields and the sizes.
    positional: number of arguments, besides hidden states, that it gives a block by their place.
    """

    hc_config_class: type[DiffusionConfig]
    positional: int

    def __init__(self, *args, **kwargs):
        fields = {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
        super().__init__(*args, **kwargs)
        self.add_connections(self.hc_config_class(**fields, **_sizes(self)))

    def add_connections(self, config: DiffusionConfig) -> None:
        """Give its blocks, which its base has built, hyper-connections."""
        self.register_to_config(**{name: getattr(config, name) for name in FIELDS})
        self.hc_config = config
        blocks: list[Any] = list(self.decoder_layers)
        for index, block in enumerate(blocks):
            block_class: Any = type(block)
            block.__class__ = _block_class(block_class, cut_layer(block_class, block), self.positional)
            block.add_connections(config, index, len(blocks))

    @property
    def decoder_layers(self) -> nn.ModuleList:
        """Return the blocks."""
        return getattr(self, BLOCKS)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """Load a model that was saved with its hyper-connections.

        Raises `UnsupportedCheckpointError` for a model without hyper-connections.
        """
        with_info = kwargs.pop("output_loading_info", False)
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        if any(map(is_of_connection, info["missing_keys"])):
            raise UnsupportedCheckpointError(
                f"{args[0]!r} holds no hyper-connections for {cls.__name__}. Load it with "
                f"{cls.__name__.removeprefix('HC')}, and give that to convert_model or load_hc."
            )
        return (model, info) if with_info else model

    def save_pretrained(self, *args, **kwargs):
        """Save the model, and warn of layers in old places and of connections in 16 bits."""
        warn_of_old_places(self)
        warn_of_narrow({name: parameter.dtype for name, parameter in self.named_parameters()})
        super().save_pretrained(*args, **kwargs)

    @torch.no_grad()
    def materialize_connections(self, device: torch.device) -> None:
        """Create and initialize the tensors that hyper-connections have on the meta device."""
        modules: list[Any] = [*self.modules()]
        for connection in modules:
            if isinstance(connection, InitializedModule) and any(p.is_meta for p in connection.parameters()):
                connection.to_empty(device=device)
                inner: list[Any] = [*connection.modules()]
                for module in inner:
                    if isinstance(module, InitializedModule):
                        for name, value in module.initial_values().items():
                            getattr(module, name).copy_(value)
                    else:
                        module.reset_parameters()


def convert_transformer(model: Any, fields: Mapping[str, object], check: Callable[[Any], object]) -> Any:
    """Convert a model of diffusers as `convert_model` does.

    check: is called with the conversion before its hyper-connections use memory; its errors end the conversion.

    Raises `UnsupportedCheckpointError` for a model of another form, and for a hooked or patched model.
    """
    blocks, name = getattr(model, BLOCKS, None), type(model).__name__
    if not isinstance(blocks, nn.ModuleList) or not len(blocks):
        raise UnsupportedCheckpointError(
            f"{name} has no `{BLOCKS}`, so it can't be converted. Give a transformer of diffusers, such as "
            f"DiTTransformer2DModel."
        )
    for path, module in model.named_modules():
        if "forward" in vars(module) or any(hooks_of(module).values()):
            raise UnsupportedCheckpointError(
                f"{path or 'the model'} has a hook or another forward than its class, which a conversion of this "
                f"{name} would not have. Convert first, and do that to the converted model."
            )
    for block in blocks:
        cut_layer(type(block), block)
    model_class: Any = type(model)
    hc_class = hyper_connection_class(model_class)
    base: Any = PreTrainedConfig(**_sizes(model))
    base.model_type = hc_class.hc_config_class.base_model_type
    config = hc_class.hc_config_class.from_prenorm(base, **fields)
    converted = deepcopy(model, {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]})
    converted.__class__ = hc_class
    with torch.device("meta"):
        converted.add_connections(config)
    check(converted)
    converted.materialize_connections(model.device)
    return converted


def hyper_connection_class(model_class: Any) -> Any:
    """Return the hyper-connection class for a class of diffusers.

    Raises `UnsupportedCheckpointError` when it does more with the stream than pass it from block to block.
    """
    return _make_class(model_class, model_class.forward)


@cache
def _make_class(model_class: Any, forward_that_runs: Callable) -> Any:
    """Make the result of `hyper_connection_class`; again when the class has another forward."""
    name = model_class.__name__
    loop = read_layer_loop(running_code(model_class, decorated_by=None).definition, name, BLOCKS)
    if loop.takes_first or loop.between:
        raise UnsupportedCheckpointError(f"{name} takes more than a stream from its blocks, so it can't be converted.")
    types = {"model_type": f"hc_{name}", "base_model_type": name, "__module__": __name__}
    own = [inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=value) for field, value in FIELDS.items()]
    signature = inspect.signature(model_class.__init__)

    def init(self, *args, **kwargs):
        HyperConnectionTransformer.__init__(self, *args, **kwargs)

    @wraps(model_class.forward)
    def forward(self, *args, **kwargs):
        place_layers(self.decoder_layers, self.hc_config)
        warn_of_training(self.decoder_layers)
        return model_class.forward(self, *args, **kwargs)

    # diffusers reads the fields of a config there
    parameters = [*signature.parameters.values(), *own]
    vars(init)["__signature__"] = signature.replace(parameters=parameters)
    namespace = {
        "__module__": __name__,
        "__doc__": f"`{name}` with hyper-connections.",
        "__init__": init,
        "forward": forward,
        "hc_config_class": strict(type(f"HC{name}Config", (DiffusionConfig,), types)),
        "positional": loop.positional,
        "_keep_in_fp32_modules": [*(model_class._keep_in_fp32_modules or ()), *FLOAT32_MODULES],
        **{
            attribute: [*names, *(f"HC{name}" for name in names)]
            for attribute in ("_no_split_modules", "_repeated_blocks")
            if (names := getattr(model_class, attribute))
        },
    }
    return type(f"HC{name}", (HyperConnectionTransformer, model_class), namespace)


@cache
def _block_class(block_class: Any, cut: Cut, positional: int) -> type[nn.Module]:
    attributes = {
        "__module__": __name__,
        "class_arguments": (block_class, cut, positional),
        "positional": tuple(inspect.signature(block_class.forward).parameters)[2 : 2 + positional],
        **layer_attributes(block_class, cut),
    }
    return type(f"HC{block_class.__name__}", (HyperConnectionBlock, block_class), attributes)


def _empty_block(block_class: Any, cut: Cut, positional: int) -> nn.Module:
    hc_class = _block_class(block_class, cut, positional)
    return hc_class.__new__(hc_class)


def _sizes(model: Any) -> dict[str, Any]:
    size, heads, of_head = (
        model.config.get(name) for name in ("hidden_size", "num_attention_heads", "attention_head_dim")
    )
    if size is None and (heads is None or of_head is None):
        raise UnsupportedCheckpointError(
            f"the config of {type(model).__name__} has neither hidden_size nor num_attention_heads and "
            f"attention_head_dim, whose product that would be, so it can't be converted."
        )
    return {"hidden_size": size or heads * of_head, "num_hidden_layers": len(getattr(model, BLOCKS))}


def __getattr__(name: str) -> Any:
    base = getattr(diffusers, name.removeprefix("HC").removesuffix("Config"), None)
    if name.startswith("HC") and isinstance(base, type) and issubclass(base, ModelMixin):
        hc_class = hyper_connection_class(base)
        return hc_class.hc_config_class if name.endswith("Config") else hc_class
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
