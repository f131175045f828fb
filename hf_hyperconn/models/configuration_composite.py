# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The config of a model that has its layers in an inner model, such as its language model."""

from copy import deepcopy
from typing import TYPE_CHECKING, Any, ClassVar

from transformers import PreTrainedConfig

from .configuration_hyper_connections import HyperConnectionConfig, ShippedConfig, base_on_the_hub, without_its_folder
from .connection_fields import FIELDS, GivenFields
from .transformers_seam import implementations

if TYPE_CHECKING:
    from typing import Unpack


class HyperConnectionCompositeConfig(ShippedConfig):
    """Mixin before the config of a model that has its layers in an inner model.

    The inner model's config has the fields of `HyperConnectionConfig`. They may be given beside it.

    part_field: the field with the inner model's config; `text_config` of a language model.
    part_class: the class of the inner model's config.
    """

    part_field: ClassVar[str] = "text_config"
    part_class: ClassVar[type[HyperConnectionConfig]]

    @property
    def connection_config(self):
        """Return the config with the fields of connections: the inner model's."""
        return getattr(self, self.part_field)

    def __post_init__(self, **kwargs):
        part_class, part, field = self.part_class, self.connection_config, self.part_field
        given = {name: kwargs.pop(name) for name in FIELDS if name in kwargs}
        model_type = part.get("model_type") if isinstance(part, dict) else getattr(part, "model_type", None)
        if model_type not in (None, part_class.model_type, part_class.base_model_type):
            raise ValueError(
                f"{field} must have model_type {part_class.model_type!r} in a {type(self).__name__} "
                f"(got {model_type!r}). Give another."
            )
        if given and isinstance(part, part_class):
            name = part_class.__name__
            raise ValueError(f"{', '.join(given)} belong in {field}, which is a {name}. Set them there.")
        if isinstance(part, dict):
            setattr(self, field, part_class(**{**without_its_folder(part, part_class), **given}))
        super().__post_init__(**kwargs)
        part = self.connection_config
        if part.model_type != part_class.model_type:  # a config of the base, or made by the base's class
            fields = {**without_its_folder(part.to_dict(), part_class), **given, **implementations(part)}
            setattr(self, field, part_class(**fields))

    def to_diff_dict(self) -> dict:
        """Return the fields that differ from defaults, also within the inner model's config."""
        return {**super().to_diff_dict(), self.part_field: self.connection_config.to_diff_dict()}

    @classmethod
    def from_prenorm(cls, config: PreTrainedConfig, **fields: "Unpack[GivenFields]"):
        """Make this family's config of the Pre-Norm `config`, like `HyperConnectionConfig.from_prenorm`."""
        cls.check_base(config)
        base = {
            name: deepcopy(getattr(config, name)) if name in config.sub_configs else value
            for name, value in without_its_folder(config.to_dict(), cls).items()
        }
        base[cls.part_field] = cls.part_class.from_prenorm(getattr(config, cls.part_field), **fields)
        # other parts keep their implementations
        own: dict[str, Any] = {name: {"": value} for name, value in implementations(config).items()}
        return cls(**base, **base_on_the_hub(config), **own)
