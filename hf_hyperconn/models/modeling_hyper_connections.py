# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""What every hyper-connection model shares.

The streams live between the first and the last decoder layer: the first expands the embeddings into them and the last
reads them out, so that the rest of a Transformers model never meets them.
"""

import threading
from contextlib import contextmanager
from contextvars import ContextVar
from copy import copy

import torch
from torch import nn
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, PreTrainedModel
from transformers import initialization as init

from .dynamic_activations import replace_norms
from .hyper_connections import InitialisedModule
from .hyper_connections_layer import has_readout_module
from .sub_layers import ADDED, READOUT, is_of_connection
from .transformers_seam import declare, share_implementation_of_experts, share_names_of_weights

# whether this thread is loading a base, whose checkpoint lacks them
_loads_a_base: ContextVar[bool] = ContextVar("_loads_a_base", default=False)
_loading = threading.RLock()


class HyperConnectionPreTrainedModel:
    """Mixin before a family's `PreTrainedModel`.

    decoder_layer_class: the family's decoder layer on residual streams.
    auto_map: `file.Class` behind every Auto class; a saved model ships these files.
    """

    decoder_layer_class: type[nn.Module]
    auto_map: dict[str, str]
    _pp_plan = None

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if "decoder_layer_class" in vars(cls):
            cls._adopt_family(cls.__bases__[-1])
        elif cls.__module__.startswith("torch."):
            # FSDP2's, for one instance, whose code is that of the class it was made of
            cls.__module__ = cls.__bases__[-1].__module__
        if cls.__name__.startswith("HC"):
            share_names_of_weights(cls.__name__, cls.__name__.removeprefix("HC"))

    @classmethod
    def _adopt_family(cls, base: type[PreTrainedModel]):
        """Take over what Transformers looks up by class or model type, which the family says of its own classes."""
        layer_class, config_class = cls.decoder_layer_class, cls.config_class
        of_language_model = hasattr(config_class, "text_config_class")  # which records its hidden states itself
        declare(
            cls,
            base,
            _no_split_modules=lambda of_base: [
                *((of_base or ()) if of_language_model else ()),
                layer_class.__name__,
            ],
            _can_record_outputs=lambda of_base: (
                of_base if of_language_model else {**(of_base or {}), "hidden_states": layer_class}
            ),
            _keep_in_fp32_modules_strict=lambda of_base: [
                *(of_base or ()),
                *(part.connection for part in layer_class.parts),
            ],
        )
        share_implementation_of_experts(cls, base)
        share_names_of_weights(config_class.model_type, config_class.base_model_type)

    def post_init(self):
        # the base's own __init__ has collected the layer classes of the modules that were replaced since
        self.__dict__.pop("_no_split_modules", None)
        if has_readout_module(self.config.of_layers):
            self._keep_in_fp32_modules_strict = {*self._keep_in_fp32_modules_strict, READOUT}
        if _loads_a_base.get():
            self._keys_to_ignore_on_load_missing = {*(self._keys_to_ignore_on_load_missing or ()), ADDED.pattern}
        self.add_model_tags(["hyper-connections", "hf-hyperconn", f"hc-x{self.config.of_layers.hc_mult}"])
        super().post_init()

    def _initialize_weights(self, module, is_custom_code=False):
        # as for the base's class, whose weights these are: what is custom code may not know which have been loaded
        super()._initialize_weights(module)

    @torch.no_grad()
    def initialize_weights(self):
        # before a part that is a model of Transformers', such as Dinov2's encoder, does it in its own way
        for part in self.modules():
            if isinstance(part, PreTrainedModel) and not isinstance(part, HyperConnectionPreTrainedModel):
                for module in part.modules():
                    if isinstance(module, InitialisedModule) or hasattr(module, "hc_output_projection"):
                        self._initialize_weights(module)
        super().initialize_weights()

    def _init_weights(self, module):
        super()._init_weights(module)
        if isinstance(module, InitialisedModule):
            for name, value in module.initial_values().items():
                parameter = getattr(module, name)
                init.copy_(parameter, _sharded_like(value, parameter))
        elif (name := getattr(module, "hc_output_projection", None)) is not None:
            config = self.config.of_layers
            std = getattr(config, "initializer_range", 0.02) * config.hc_mult**-0.5
            init.normal_(getattr(module, name), mean=0.0, std=std)

    def materialise_connections(self, device: torch.device) -> None:
        """Create and initialise what hyper-connections have on the meta device, where loading leaves new weights."""
        for module in self.modules():
            if isinstance(module, HyperConnectionPreTrainedModel):
                innermost = module  # a language model starts its norms in its own way
            if isinstance(module, InitialisedModule) and any(p.is_meta for p in module.parameters()):
                module.to_empty(device=device)
                module.apply(innermost._init_weights)

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

    def save_pretrained(self, save_directory, **kwargs):
        """As Transformers' own; the config names every Auto class, so that the folder loads without this package."""
        self.config.auto_map = dict(self.auto_map)
        with without_fsdp_prefix(type(self)):
            super().save_pretrained(save_directory, **kwargs)

    @classmethod
    def from_pretrained(cls, *args, **kwargs):
        """As Transformers' own, but threads load one after the other.

        While it builds a model, it exchanges functions and the default dtype that all threads use; two threads at once
        may leave what they exchanged, such as a `tie_weights` that does nothing.
        """
        with _loading:
            return super().from_pretrained(*args, **kwargs)

    @classmethod
    def from_prenorm(
        cls,
        pretrained_model_name_or_path,
        *,
        hc_mult: int | None = None,
        connection: str = "dhc",
        hc_tanh: bool = True,
        hc_readout: str | None = None,
        hc_start: str = "copies",
        hc_history: str = "type",
        hc_block: int = 1,
        **kwargs,
    ):
        """Load a base checkpoint as this class, with hyper-connections at the equivalent initialisation.

        The result computes the same logits as the base, bit for bit (but for `hc_readout="sum"`).

        pretrained_model_name_or_path: a local folder or a Hub id.
        hc_mult, connection, hc_tanh, hc_readout, hc_start, hc_history, hc_block: see `HyperConnectionConfig`, and its
            `from_prenorm` for None.
        kwargs: as for `from_pretrained` (`dtype`, `device_map`, `revision`, ...).

        Raises `ValueError` when the checkpoint belongs to another family, does not hold all of the base's weights or
        would be offloaded to disk.
        """
        hub = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
        base_config = kwargs.pop("config", None) or AutoConfig.from_pretrained(
            pretrained_model_name_or_path, **{name: kwargs[name] for name in hub if name in kwargs}
        )
        config = cls.config_class.from_prenorm(
            base_config,
            hc_mult=hc_mult,
            connection=connection,
            hc_tanh=hc_tanh,
            hc_readout=hc_readout,
            hc_start=hc_start,
            hc_history=hc_history,
            hc_block=hc_block,
        )
        with_info = kwargs.pop("output_loading_info", False)
        token = _loads_a_base.set(True)
        try:
            model, info = cls.from_pretrained(
                pretrained_model_name_or_path, config=config, output_loading_info=True, **kwargs
            )
        finally:
            _loads_a_base.reset(token)
        new = {name for name, _ in model.named_parameters() if is_of_connection(name)}
        info["missing_keys"] = new.union(info["missing_keys"])
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

    stack: where it has its layers.
    """

    stack = "layers"

    def __init__(self, config):
        with without_decoder_layers(config, self) as empty:
            super().__init__(empty)
        replace_norms(self, config)
        layers = nn.ModuleList(self.decoder_layer_class(config, i) for i in range(config.num_hidden_layers))
        owner, _, name = self.stack.rpartition(".")
        setattr(self.get_submodule(owner), name, layers)
        self.post_init()

    @property
    def decoder_layers(self) -> nn.ModuleList:
        """Its layers, wherever the family has them."""
        return self.get_submodule(self.stack)


class HyperConnectionComposite:
    """Mixin before a family's base model that has a language model in it: that has the layers.

    language_model_class: of the language model.
    stack: where it has its layers.
    """

    language_model_class: type[PreTrainedModel]
    stack = "language_model.layers"

    def __init__(self, config):
        let_auto_model_find(config.of_layers, self.language_model_class)
        with without_decoder_layers(config, self) as empty:
            super().__init__(empty)
        name = self.stack.partition(".")[0]
        setattr(self, name, self.language_model_class._from_config(config.of_layers))
        self.post_init()

    @property
    def decoder_layers(self) -> nn.ModuleList:
        """The layers of its language model."""
        return self.get_submodule(self.stack)


class HyperConnectionHead:
    """Mixin before a family's class with a head: its base model is `model_class`."""

    model_class: type[PreTrainedModel]

    def __init__(self, config):
        let_auto_model_find(config, self.model_class)
        if (language_model_class := getattr(self.model_class, "language_model_class", None)) is not None:
            let_auto_model_find(config.of_layers, language_model_class)
        with without_decoder_layers(config, self) as empty:
            super().__init__(empty)
        of_base = self.model_class.__name__.removeprefix("HC")
        names = [name for name, child in self.named_children() if type(child).__name__ == of_base]
        model = self.model_class(config)
        for name in names:
            build_as(model, getattr(self, name))
        setattr(self, *names or [self.base_model_prefix], model)
        self.post_init()


def build_as(model: nn.Module, base: nn.Module) -> None:
    """Give a model the optional parts that its base has, and no others: some heads have no use for a pooler."""
    modules = dict(model.named_modules())
    for path, theirs in base.named_modules():
        ours = modules.get(path)
        if not isinstance(ours, type(theirs)):
            continue
        for name in {*theirs._modules, *theirs._parameters, *ours._modules, *ours._parameters}:
            if hasattr(theirs, name) and (getattr(theirs, name) is None) != (getattr(ours, name, None) is None):
                setattr(ours, name, getattr(theirs, name))


def let_auto_model_find(config, model_class: type[PreTrainedModel]) -> None:
    """Register a class with AutoModel, which some bases ask for a part of theirs."""
    # the file of this config may have been loaded more than once
    if type(config).__name__ == model_class.config_class.__name__ and type(config) not in MODEL_MAPPING:
        AutoModel.register(type(config), model_class, exist_ok=True)


@contextmanager
def without_decoder_layers(config, model: nn.Module):
    """A copy of `config` with which a base class's `__init__` builds everything but decoder layers, which come later.

    A request for gradient checkpointing, which `post_init` takes out of a config, waits for those layers. Afterwards
    `model` has `config` itself, with what Transformers settled in the copy, such as the attention implementation.
    """
    of_layers = config.of_layers
    empty_layers = copy(of_layers)
    empty_layers.num_hidden_layers = 0
    copies = [(of_layers, empty_layers)]
    if of_layers is not config:
        whole = copy(config)
        whole.text_config = empty_layers
        copies.append((config, whole))
    before = [dict(vars(empty)) for _, empty in copies]
    for _, empty in copies:
        empty.__dict__.pop("gradient_checkpointing", None)
    yield copies[-1][1]
    for (original, empty), then in zip(copies, before, strict=True):
        now = {name: value for name, value in vars(empty).items() if value is not then.get(name, then)}
        original.__dict__.update(now)
    for module in model.modules():
        for original, empty in copies:
            if getattr(module, "config", None) is empty:
                module.config = original


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
