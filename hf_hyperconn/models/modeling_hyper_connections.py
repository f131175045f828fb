# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Mixins of every model with hyper-connections: its pretrained class, its base model, its heads.

The first decoder layer expands the embeddings into streams and the last one reads them out. So the rest of a
Transformers model never meets them.

A base's `__init__` builds a model. Then its layers, and its inner models with layers, get their classes with
hyper-connections (`adopt`).
"""

import os
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from contextvars import ContextVar
from functools import wraps
from typing import TYPE_CHECKING, Any, TypeVar, overload

import transformers
from torch import nn
from transformers import MODEL_MAPPING, AutoConfig, AutoModel, PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from .chosen_code import readout_maker, refuse_others, replace_norms
from .connection_fields import FIELDS, GivenFields, fault_of_start, inequivalence, unread_field
from .connection_weights import InitialWeights, warn_of_narrow, warn_of_old_places
from .decoder_layer import HyperConnectionDecoderLayer
from .pipeline_stages import exchange_streams, refuse_generating_in_stages
from .shipped_code import code_of, modules_in, source_in
from .sub_layers import READOUT, is_of_connection
from .transformers_seam import (
    base_config_error,
    declare,
    dtypes_in,
    share_implementation_of_experts,
    share_names_of_weights,
)

logger = logging.get_logger(__name__)

HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")
# whether this thread is in `from_prenorm`, where connections are new
_loads_a_base: ContextVar[bool] = ContextVar("_loads_a_base", default=False)
# the checkpoint that this thread loads: its name, options of the Hub, and the names of connections that are new on it
_loaded: ContextVar[tuple[Any, dict[str, Any], set[str]]] = ContextVar("_loaded", default=(None, {}, set()))
# one for all copies of this file, as of several folders in a process
_loading = vars(transformers).setdefault("_hf_hyperconn_loading", threading.RLock())

if TYPE_CHECKING:
    from typing import Unpack

    Base = PreTrainedModel
else:
    Base = object
Model = TypeVar("Model", bound="HyperConnectionPreTrainedModel")


class HyperConnectionPreTrainedModel(InitialWeights):
    """Mixin before a family's `PreTrainedModel`.

    config_class: the family's config, with the fields of hyper-connections.
    layer_classes: the family's decoder layers on residual streams.
    auto_map: `file.Class` behind every Auto class; a saved model contains these files.
    code_package: package with these files as modules.
    """

    config_class: Any
    layer_classes: tuple[type[HyperConnectionDecoderLayer], ...]
    auto_map: dict[str, str]
    code_package: str
    _pp_plan: Any = None

    def __init_subclass__(cls, **kwargs):
        super().__init_subclass__(**kwargs)
        if hasattr(cls, "convert_layers") and plain_class(cls) in cls.__bases__:
            base: Any = plain_class(cls)
            cls.__init__ = init_with_connections(base.__init__)  # type: ignore[method-assign]
        if "layer_classes" in vars(cls):
            cls._adopt_family(plain_class(cls))
        elif cls.__module__.startswith("torch."):
            # FSDP2 makes a class for one instance, without code of its own
            cls.__module__ = cls.__bases__[-1].__module__
        if cls.__name__.startswith("HC"):
            share_names_of_weights(cls.__name__, cls.__name__.removeprefix("HC"))

    @classmethod
    def _adopt_family(cls, base: type[PreTrainedModel]):
        """Copy the base's declarations that Transformers looks up by class or model type."""
        layer_classes, config_class = cls.layer_classes, cls.config_class
        cls.code_package = cls.__module__.rpartition(".")[0]
        wrapped = getattr(base, "_no_split_modules", None) if hasattr(config_class, "part_class") else None
        declare(cls, "_no_split_modules", [*(wrapped or ()), *(layer.__name__ for layer in layer_classes)])
        wide = getattr(base, "_keep_in_fp32_modules_strict", None)
        connections = dict.fromkeys(part.connection for layer in layer_classes for part in layer.parts)
        declare(cls, "_keep_in_fp32_modules_strict", [*(wide or ()), *connections])
        share_implementation_of_experts(cls, base)
        share_names_of_weights(config_class.model_type, config_class.base_model_type)

    @classmethod
    def register_parts(cls, config) -> None:
        """Let AutoModel find the classes of inner models, where the base builds them by AutoModel."""

    def post_init(self):
        self._tell_config_of_code()
        with suppress(Exception):  # saving raises it again
            code_of(source_in(self.code_package), modules_in(self.auto_map))  # keeps the sources that run now
        # the base's class may have collected its own before this class adopted the model
        for name in ("_no_split_modules", "_keep_in_fp32_modules_strict"):
            self.__dict__.pop(name, None)
        if readout_maker(self.config.connection_config) is not None:
            self._keep_in_fp32_modules_strict = {*(self._keep_in_fp32_modules_strict or ()), READOUT}
        self.add_model_tags(["hyper-connections", "hf-hyperconn", f"hc-x{self.config.connection_config.hc_mult}"])
        super().post_init()

    @classmethod
    def prepare_distribute_model(cls, distributed_config, *args, **kwargs):
        """Distribute the model by `from_pretrained(distributed_config=...)`."""
        sizes = distributed_config if isinstance(distributed_config, dict) else vars(distributed_config)
        if (pp_size := sizes.get("pp_size") or 1) > 1:
            refuse_generating_in_stages(cls, pp_size)
        return super().prepare_distribute_model(distributed_config, *args, **kwargs)

    @classmethod
    def maybe_distribute_model(cls, model, *args, **kwargs):
        distributed: Any = super().maybe_distribute_model(model, *args, **kwargs)
        if hasattr(distributed, "_pp_stage"):
            exchange_streams(distributed)
        return distributed

    def _tell_config_of_code(self) -> None:
        """Set the place of the models' code in the config, which saves the code."""
        config_class: Any = type(self.config)
        config_class.code_package, config_class.source_in = self.code_package, staticmethod(source_in)

    def save_pretrained(self, save_directory, *args, **kwargs):
        """Save the model, with every Auto class in its config, so that the folder loads without this package."""
        self.config.auto_map = dict(self.auto_map)
        self._tell_config_of_code()
        warn_of_old_places(self)
        state = kwargs.get("state_dict") or dict(self.named_parameters())
        warn_of_narrow({name: tensor.dtype for name, tensor in state.items()})
        model_class = type(self)
        name = model_class.__name__
        model_class.__name__ = name.removeprefix("FSDP")  # FSDP2 makes a class for one instance
        try:
            super().save_pretrained(save_directory, *args, **kwargs)
        finally:
            model_class.__name__ = name

    def _prepare_decoder_input_ids_for_generation(self, batch_size, model_input_name, model_kwargs, *args, **kwargs):
        """Add no start token to a prompt of Whisper, as Transformers does by the base's model type."""
        if self.config.base_model_type == "whisper" and model_kwargs.get("decoder_input_ids") is not None:
            return model_kwargs.pop("decoder_input_ids"), model_kwargs
        prepare: Any = super()
        return prepare._prepare_decoder_input_ids_for_generation(
            batch_size, model_input_name, model_kwargs, *args, **kwargs
        )

    def _get_candidate_generator(self, generation_config, *args, **kwargs):
        if getattr(generation_config, "use_mtp", None):  # it would build layers of these classes, without connections
            raise ValueError(
                "use_mtp must be False (got True): layers that predict further tokens take one stream. Leave it out."
            )
        of_generation: Any = super()
        return of_generation._get_candidate_generator(generation_config, *args, **kwargs)

    @classmethod
    def _load_pretrained_model(cls, model, state_dict, checkpoint_files, *args, **kwargs):
        warn_of_narrow(dtypes_in(state_dict, checkpoint_files))
        load: Any = super()._load_pretrained_model
        return load(model, state_dict, checkpoint_files, *args, **kwargs)

    def _adjust_missing_and_unexpected_keys(self, loading_info) -> None:
        """Remove new connections from Transformers' report of missing weights, and say how they start."""
        report: Any = super()
        report._adjust_missing_and_unexpected_keys(loading_info)
        name, where, new = _loaded.get()
        connections = {key for key, _ in self.named_parameters() if is_of_connection(key)}
        if not connections or not connections <= loading_info.missing_keys:
            return
        if not _loads_a_base.get():
            model_type = None
            with suppress(OSError, ValueError):  # without a config.json
                model_type = PreTrainedConfig.get_config_dict(name, **where)[0].get("model_type")
            if model_type != self.config.base_model_type:
                return
            logger.warning(_start_on(name, vars(self.config.connection_config)))
        new |= connections
        loading_info.missing_keys = loading_info.missing_keys - connections

    @classmethod
    def from_pretrained(cls: type[Model], *args, **kwargs) -> Model:
        """Load a model, one thread after the other; a base gets new connections.

        While Transformers builds a model, it replaces functions and the default dtype of all threads. Two threads at
        once may leave replacements behind, such as a `tie_weights` that does nothing.
        """
        name = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        where, new = {option: kwargs[option] for option in HUB_OPTIONS if option in kwargs}, set[str]()
        with _loading:
            token = _loaded.set((name, where, new))
            try:
                loaded: Any = super().from_pretrained(*args, **kwargs)
            finally:
                _loaded.reset(token)
        if kwargs.get("output_loading_info"):
            loaded[1]["missing_keys"] = new.union(loaded[1]["missing_keys"])
        return loaded

    @overload
    @classmethod
    def from_prenorm(cls: type[Model], pretrained_model_name_or_path, **fields: "Unpack[GivenFields]") -> Model: ...

    @overload
    @classmethod
    def from_prenorm(cls: type[Model], pretrained_model_name_or_path, **kwargs: Any) -> Model: ...

    @classmethod
    def from_prenorm(cls: type[Model], pretrained_model_name_or_path, **kwargs: Any) -> Model:
        """Load a base checkpoint as this class, with hyper-connections at the equivalent initialization.

        The result computes the same logits as the base, bit for bit, except with the readouts "sum" and "learned".

        pretrained_model_name_or_path: a local folder or a Hub id.
        kwargs: `connection`, `hc_mult` and others of `HyperConnectionConfig`; see its `from_prenorm` for None. Others
            go to `from_pretrained` (`dtype`, `device_map`, `revision`, ..., and fields of the base's config).

        Raises `ValueError` for fields that no conversion accepts. Raises it also for a checkpoint of another family,
        for missing weights, and for offloading to disk.
        """
        if isinstance(pretrained_model_name_or_path, nn.Module):
            name = type(pretrained_model_name_or_path).__name__
            raise TypeError(f"the base must be a folder or a Hub id (got a {name}). Call convert_model on a model.")
        cls.config_class.refuse_mistaken(kwargs)
        given = {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
        if fault := unread_field(given):
            raise ValueError(f"{fault}.")
        base_config = kwargs.pop("config", None)
        if base_config is None or isinstance(base_config, str | os.PathLike):
            base_config = _load_config(base_config or pretrained_model_name_or_path, kwargs)
        config = cls.config_class.from_prenorm(base_config, **given)
        with_info = kwargs.pop("output_loading_info", False)
        token = _loads_a_base.set(True)
        try:
            loaded: Any = cls.from_pretrained(
                pretrained_model_name_or_path, config=config, output_loading_info=True, **kwargs
            )
            model, info = loaded
        finally:
            _loads_a_base.reset(token)
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
        model.materialize_connections(model.device)
        result: Any = (model, info) if with_info else model
        return result


def _load_config(name: str | os.PathLike, kwargs: dict[str, Any]) -> PreTrainedConfig:
    """Load the config of a base, and move its fields out of the arguments of `from_pretrained`."""
    where = {option: kwargs[option] for option in HUB_OPTIONS if option in kwargs}
    config = AutoConfig.from_pretrained(name, **where)
    of_loading = ("dtype", "torch_dtype", "quantization_config", *where)
    fields = {field: kwargs.pop(field) for field in [*kwargs] if field not in of_loading and hasattr(config, field)}
    return AutoConfig.from_pretrained(name, **where, **fields) if fields else config


def _start_on(base: str | os.PathLike, config: Mapping[str, Any]) -> str:
    """Say how connections with these fields start on a base."""
    fault = inequivalence(config) or fault_of_start(config)
    start = "at the equivalent initialization" if fault is None else "as for training from scratch"
    return (
        f"{str(base)!r} is a base without connections. Its weights were loaded. The connections "
        f"({config['connection']}, hc_mult={config['hc_mult']}) are new: they start {start}."
    )


class HyperConnectionModel(Base):
    """Mixin before a family's base model: its decoder layers work on residual streams.

    The family's `forward` stays, inside `reduce_recorded_streams`.

    stack: the path of its layers.
    hc_layerdrop: name of the rate at which training leaves layers out, beside the layers; None without one. It is set
        to 0, because there are no streams without the first layer.
    """

    layer_classes: Any
    stack = "layers"
    hc_layerdrop: str | None = None

    def convert_layers(self) -> None:
        """Give every decoder layer its connections.

        Raises `ValueError` for fields that are not accepted; they may have been set after the config was made. Raises
        `ImportError` for a config of a base.
        """
        if not hasattr(self.config, "validate_hyper_connections"):
            raise base_config_error(self)
        self.config.validate_hyper_connections()
        refuse_others(self.config)
        layers, classes = self.decoder_layers, {plain_class(hc_class): hc_class for hc_class in self.layer_classes}
        for index, layer in enumerate(layers):
            layer.__class__ = classes[type(layer)]
            layer.add_connections(self.config, index, len(layers))
        replace_norms(self, self.config)
        self.post_init()

    @property
    def decoder_layers(self) -> Any:
        """Return the layers."""
        return self.get_submodule(self.stack)

    def keep_every_layer(self) -> None:
        """Keep training from leaving layers out; every forward calls it."""
        owner = self.get_submodule(self.stack.rpartition(".")[0])
        if self.hc_layerdrop and getattr(owner, self.hc_layerdrop) != 0:
            logger.warning_once(f"{self.hc_layerdrop} is taken as 0: connections need every layer, in training, too.")
            setattr(owner, self.hc_layerdrop, 0.0)


class HyperConnectionHead(Base):
    """Mixin before a family's class with a head: its base model is `model_class`."""

    model_class: type[HyperConnectionPreTrainedModel]

    @classmethod
    def register_parts(cls, config) -> None:
        register_with_auto_model(config, cls.model_class)
        cls.model_class.register_parts(config)

    def convert_layers(self) -> None:
        """Give its base model connections. Raises `ValueError` when it has none."""
        for child in self.children():
            if isinstance(child, plain_class(self.model_class)):
                adopt(child, self.model_class)
        if not any(isinstance(part, self.model_class) for part in self.modules()):
            raise ValueError(
                f"{type(self).__name__} has no {self.model_class.__name__} in it, so it would have no connections. "
                f"Convert a class that has one, such as {plain_class(self.model_class).__name__} itself."
            )
        self.post_init()


def init_with_connections(built: Callable) -> Callable:
    """Return the `__init__` of a class with hyper-connections, with the arguments of its base's `__init__`."""

    @wraps(built)
    def __init__(self, config, *args, **kwargs):
        if not hasattr(config, "connection_config"):
            name, wanted = type(self).__name__, type(self).config_class.__name__
            raise TypeError(
                f"config must be of class {wanted} (got {type(config).__name__}). "
                f"Load a base by {name}.from_prenorm(BASE), or start anew by {name}({wanted}.from_prenorm(config))."
            )
        self.register_parts(config)
        built(self, config, *args, **kwargs)
        self.convert_layers()

    return __init__


def adopt(model: Any, hc_class: type[PreTrainedModel]) -> None:
    """Convert a model that a base's `__init__` has built to its class with hyper-connections."""
    if not isinstance(model, hc_class):
        # Transformers meets a class at its first model
        PreTrainedModel.__init__(hc_class.__new__(hc_class), model.config)
        is_connected = isinstance(model, HyperConnectionPreTrainedModel)
        model.__class__ = hc_class
        if not is_connected:
            model.convert_layers()


def plain_class(hc_class: type) -> type:
    """Return the family's own class behind a class with hyper-connections, or behind its subclass."""
    ours = HyperConnectionPreTrainedModel, HyperConnectionDecoderLayer
    return next(base for base in hc_class.__mro__ if issubclass(base, nn.Module) and not issubclass(base, ours))


def register_with_auto_model(config, model_class: type[HyperConnectionPreTrainedModel]) -> None:
    """Register a class with AutoModel, which some bases use to build their parts."""
    # the file of this config may have been loaded more than once
    if type(config).__name__ == model_class.config_class.__name__ and type(config) not in MODEL_MAPPING:
        AutoModel.register(type(config), model_class, exist_ok=True)
