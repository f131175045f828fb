# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Mixins of every config with hyper-connections: code that is saved with it, fields, `from_prenorm`."""

import os
from collections.abc import Iterable
from dataclasses import dataclass
from inspect import cleandoc, getdoc
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id
from transformers import PreTrainedConfig

from .connection_fields import (
    FIELDS,
    FORMAT,
    ConnectionFields,
    GivenFields,
    complete,
    fault_of_fields,
    refusal_of_fields,
)
from .shipped_code import code_of, modules_in, source_in
from .transformers_seam import implementations, share_lookups

VERSION = "0.1.0"  # of hf_hyperconn
CONVERSION_FIELDS = ("hc_base_model", "hc_base_commit", "hc_version")  # in config.json beside the fields below
# names that people give fields of connections, and that no base uses
WITHOUT_PREFIX = ("n", "start", "readout", "n_streams", "num_streams", "num_residual_streams")
FOLDER_FIELDS = ("model_type", "architectures", "auto_map", "transformers_version")

if TYPE_CHECKING:
    from typing import Unpack

    Base = PreTrainedConfig
else:
    Base = object


class ShippedConfig(Base):
    """Mixin of configs that save the code of their models.

    base_model_type: the model type of the base.
    code_package: package of the modules that `auto_map` names; None for the package of this class.
    source_in: reader of their sources; None for the function of this file.

    Models set the last two: Transformers may keep the code of a checkpoint twice, the copy of its config without the
    modules of models.
    """

    base_model_type: ClassVar[str]
    code_package: ClassVar[str | None] = None
    source_in: ClassVar[Any] = None
    base_model_pp_plan: ClassVar[Any] = None  # engines' stages exchange [tokens, D]; streams have N times D

    def __init_subclass__(cls, *args, **kwargs):
        super().__init_subclass__(*args, **kwargs)
        if hasattr(cls, "base_model_type"):  # cloudpickle sets attributes of a class afterwards
            share_lookups(cls)

    def __post_init__(self, **kwargs):
        self.refuse_mistaken(kwargs)
        super().__post_init__(**kwargs)

    @classmethod
    def get_config_dict(cls, *args, **kwargs):
        """Read a config.json. A base's counts as a config of this class with default connections."""
        config, kwargs = super().get_config_dict(*args, **kwargs)
        if config.get("model_type") == cls.base_model_type:
            config["model_type"] = cls.model_type
        return config, kwargs

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """Make a config of a dictionary.

        Raises `ValueError` for the model type of another model with hyper-connections, whose connections would be
        lost. Transformers accepts any model type with a warning.
        """
        model_type = config_dict.get("model_type")
        if str(model_type).startswith("hc_") and model_type != cls.model_type:
            raise ValueError(
                f"{cls.__name__} is of model_type {cls.model_type!r}, and this is a {model_type!r:.80}. Load it by "
                f"the Auto class, which finds its own."
            )
        known = {name: value for name, value in config_dict.items() if not _is_mistaken(name, cls)}
        return super().from_dict(known, **kwargs)

    @classmethod
    def is_custom_code(cls) -> bool:
        """Return False, because Transformers 5.16 renames `layer_types` of custom code, which the base reads."""
        return False

    @classmethod
    def refuse_mistaken(cls, names: Iterable[str]) -> None:
        """Raise `ValueError` for names that look like fields of connections and are none."""
        if mistaken := [name for name in names if _is_mistaken(name, cls)]:
            raise ValueError(
                f"{cls.__name__} has no field {', '.join(mistaken)}. Use hc_mult for the number of streams; all "
                f"fields are {', '.join(FIELDS)}."
            )

    @classmethod
    def check_base(cls, config: PreTrainedConfig) -> None:
        """Refuse a config of another family."""
        if config.model_type == cls.model_type:
            raise ValueError(
                f"the base must have no connections (got a {cls.model_type!r}). Load it by from_pretrained."
            )
        if config.model_type != cls.base_model_type:
            raise ValueError(
                f"{cls.__name__} is made from a {cls.base_model_type!r} config, not from {config.model_type!r}."
            )

    def save_pretrained(self, save_directory, push_to_hub=False, **kwargs):
        """Save the config with the format, and with the files of code that `auto_map` names and their imports.

        Transformers itself copies only code of classes that it has loaded by `auto_map`, also for a config without a
        model.
        """
        self.hc_format, self.hc_version = FORMAT, VERSION
        if self._auto_class is not None and self.code_package is None:
            return super().save_pretrained(save_directory, push_to_hub=push_to_hub, **kwargs)
        package, _, own = type(self).__module__.rpartition(".")
        self.auto_map = {"AutoConfig": f"{own}.{type(self).__name__}", **(getattr(self, "auto_map", None) or {})}
        super().save_pretrained(save_directory, **kwargs)
        this: Any = self
        read = (this.source_in or source_in)(self.code_package or package)
        for name, source in code_of(read, modules_in(self.auto_map), vars(this.connection_config)).items():
            Path(save_directory, f"{name}.py").write_text(source, encoding="utf-8", newline="\n")
        if push_to_hub:
            self.push_to_hub(kwargs.pop("repo_id", None) or Path(save_directory).name, **kwargs)


@dataclass(kw_only=True, repr=False)
class HyperConnectionConfig(ConnectionFields, ShippedConfig):
    """Mixin before a family's config.

    connection (`str`, *optional*, defaults to `"dhc"`):
        `"shc"` for static, `"dhc"` for dynamic hyper-connections; `"mhc"` for manifold-constrained ones, `"ihc"` for
        these with unmixed streams; `"frac"` for frac-connections; `"keel"` for Keel, which has one stream and no
        Pre-Norm equivalent; `"attnres"` for attention residuals; `"altup"` for AltUp; `"dual"` for ResiDual, which has
        no Pre-Norm equivalent; `"skip"` for skips from the embedding.
    hc_mult (`int`, *optional*, defaults to 4):
        Number of residual streams, at least 1 (the paper's expansion rate n); at least 2 for `"mhc"` and `"ihc"`. For
        `"frac"` the number of parts of the hidden state; 1 for `"attnres"`; 2 for `"dual"` and `"skip"`.
    hc_tanh (`bool`, *optional*, defaults to `True`):
        Whether the dynamic part of the coefficients of `"dhc"` and `"frac"` goes through tanh.
    hc_readout (`str`, *optional*, defaults to `"mean"`):
        How the streams become one before the final norm. `"mean"` keeps a converted model equal to its base; `"sum"`
        is the paper's, for training from scratch; `"weighted"` learns a weight for each stream; `"learned"` predicts
        weights from the streams (DeepSeek-V4). The parts of `"frac"` are always put side by side.
    hc_start (`str`, *optional*, defaults to `"copies"`):
        What the streams are at the start, with the same logits: `"copies"` of the residual stream, as in the paper, or
        for `"shc"` and `"dhc"` its `"history"`. Stream 0, the only one read, is then the whole, and each other stream
        a part. This requires `hc_readout="weighted"`. For `"mhc"` and `"ihc"`, `"biased"` means the initial biases of
        the mHC paper, which change the logits, for training from scratch.
    hc_history (`str`, *optional*, defaults to `"type"`):
        Which parts: outputs by the `"type"` of their sub-layer, or by its `"depth"`.
    hc_block (`int`, *optional*, defaults to 1):
        For `"attnres"`, how many sub-layers' outputs are summed to one value; 1 keeps all of them apart.
    hc_attention (`str`, *optional*, defaults to `"sum"`):
        For `"attnres"`, the input of a sub-layer: `"sum"`, the residual stream at the start, or `"mean"`, the paper's
        weighted mean, for training from scratch.
    hc_selection (`str`, *optional*, defaults to `"alternating"`):
        For `"altup"`, which stream a sub-layer reads: the next one (`"alternating"`), or always the first (`"same"`).
    hc_sinkhorn_iters (`int`, *optional*, defaults to 20):
        For `"mhc"`, how often columns and rows of the mixing matrix are normalized.
    hc_eps (`float`, *optional*, defaults to 1e-6):
        For `"mhc"`, `"ihc"` and the learned readout, added to reads, divisors and the mean square of the norm; for
        `"attnres"` to the mean square of a value, for `"skip"` of the embedding.
    norm (`str`, *optional*):
        `"dyt"` or `"derf"` puts that function in the place of every norm, for training from scratch.
    norm_alpha_attention, norm_alpha_other (`float`, *optional*):
        For these, the initial alpha before and inside attention, and elsewhere; by default the papers'.
    hc_format (`int`, *optional*, defaults to 1):
        Format of the folder that the config was read from; `save_pretrained` writes the current one.
    """

    hc_format: int = 1

    def __init_subclass__(cls, *args, **kwargs):
        super().__init_subclass__(*args, **kwargs)
        if own := vars(cls).get("__doc__"):
            meanings = str(getdoc(HyperConnectionConfig)).partition("\n\n")[2]
            cls.__doc__ = f"{cleandoc(own)}\n\n{meanings}"

    @property
    def connection_config(self):
        """Return the config with the fields of connections: this one."""
        return self

    def validate_hyper_connections(self):
        """Refuse values of hyper-connection fields that are not accepted; a part of the `@strict` validation."""
        if self.hc_format > FORMAT:
            raise ValueError(
                f"hc_format is {self.hc_format}; hf_hyperconn {VERSION} reads formats up to {FORMAT}. Update it, or "
                f"load the folder with the code that it brings (trust_remote_code=True)."
            )
        config = {name: getattr(self, name) for name in FIELDS}
        if self.connection == "frac":
            config["hidden_size"] = self.hidden_size
        if reason := fault_of_fields(config):
            raise ValueError(f"{reason}.")

    @classmethod
    def from_prenorm(cls, config: PreTrainedConfig, **fields: "Unpack[GivenFields]"):
        """Make this family's config of the Pre-Norm `config`, with the given hyper-connection `fields`.

        Where `hc_readout` is None or not given, the model stays exact: it is "weighted" for the history start, else
        "mean". Where `hc_mult` is None or not given, it is 4; for connections of one stream 1.

        The config keeps the name of a base on the Hub, as `hc_base_model`.

        Raises `ValueError` when `config` belongs to another family, or no model with `fields` is equivalent to it.
        """
        if reason := refusal_of_fields(fields):
            raise ValueError(f"{reason}.")
        cls.check_base(config)
        base = without_its_folder(config.to_dict(), cls)
        return cls(**{**base, **complete(fields), **base_on_the_hub(config)}, **implementations(config))


def _is_mistaken(name: str, config_class: Any) -> bool:
    """Tell whether a name resembles a field of connections and is none."""
    known = (*config_class.__dataclass_fields__, *FIELDS, "hc_format", *CONVERSION_FIELDS)
    return name in WITHOUT_PREFIX or (name.startswith("hc_") and name not in known)


def without_its_folder(config: dict, config_class: type) -> dict:
    """Return the fields of a config without fields of its folder and without mistaken ones."""
    return {k: value for k, value in config.items() if k not in FOLDER_FIELDS and not _is_mistaken(k, config_class)}


def base_on_the_hub(config: PreTrainedConfig) -> dict[str, Any]:
    """Return the name of a base from the Hub as `hc_base_model`; empty for a folder."""
    name = config.name_or_path or ""
    try:
        validate_repo_id(name)
    except HFValidationError:
        return {}
    return {"hc_base_model": name} if "/" in name and not os.path.isdir(name) else {}
