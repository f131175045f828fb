# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The config of a model that has its layers in another model, such as its language model."""

from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedConfig

from .configuration_hyper_connections import HyperConnectionConfig, ShippedConfig, base_on_the_hub, without_its_folder
from .connection_fields import FIELDS, GivenFields
from .transformers_seam import implementations

if TYPE_CHECKING:
    from typing import Unpack


class HyperConnectionCompositeConfig(ShippedConfig):
    """Mixin before the config of a model that has its layers in another model, its language model.

    The fields of `HyperConnectionConfig` are those of `text_config`, and may be given beside it.

    part_field: where that model has its config; `text_config`, if it is the language model.
    part_class: what that is, with the fields of `HyperConnectionConfig`.
    """

    part_field: ClassVar[str] = "text_config"
    part_class: ClassVar[type[HyperConnectionConfig]]

    @property
    def of_layers(self):
        """The config that has the fields of hyper-connections: that of the model with the layers."""
        return getattr(self, self.part_field)

    def __post_init__(self, **kwargs):
        wanted, found, field = self.part_class, self.of_layers, self.part_field
        given = {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
        chosen = found.get("model_type") if isinstance(found, dict) else getattr(found, "model_type", None)
        if chosen not in (None, wanted.model_type, wanted.base_model_type):
            raise ValueError(f"{field} has model_type {chosen!r}; {type(self).__name__} takes {wanted.model_type!r}.")
        if given and isinstance(found, wanted):
            raise ValueError(f"{', '.join(given)} belong in {field}, which is a {wanted.__name__}. Set them there.")
        if isinstance(found, dict):
            setattr(self, field, wanted(**{**without_its_folder(found, wanted), **given}))
        super().__post_init__(**kwargs)
        made = self.of_layers
        if made.model_type != wanted.model_type:  # one without hyper-connections, or made by the base
            setattr(
                self,
                field,
                wanted(**{**without_its_folder(made.to_dict(), wanted), **given}, **implementations(made)),
            )

    def to_diff_dict(self) -> dict:
        """As Transformers' own, but with all that the config of the model with the layers has."""
        return {**super().to_diff_dict(), self.part_field: self.of_layers.to_diff_dict()}

    @classmethod
    def from_prenorm(cls, config: PreTrainedConfig, **fields: "Unpack[GivenFields]"):
        """This family's config for the Pre-Norm `config`, with the hyper-connection `fields` given.

        Raises `ValueError` as that of `HyperConnectionConfig`.
        """
        if config.model_type != cls.base_model_type:
            raise ValueError(
                f"{cls.__name__} is made from a {cls.base_model_type!r} config, not from {config.model_type!r}."
            )
        base = {
            name: deepcopy(getattr(config, name)) if name in config.sub_configs else value
            for name, value in without_its_folder(config.to_dict(), cls).items()
        }
        base[cls.part_field] = cls.part_class.from_prenorm(getattr(config, cls.part_field), **fields)
        # other parts keep theirs
        own: dict[str, Any] = {name: {"": value} for name, value in implementations(config).items()}
        return cls(**base, **base_on_the_hub(config), **own)
