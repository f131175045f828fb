# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Mixins of models with layers in an inner model, or in several: an encoder and a decoder."""

from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel

from .chosen_code import replace_norms
from .modeling_hyper_connections import HyperConnectionPreTrainedModel, adopt, register_with_auto_model

if TYPE_CHECKING:
    Base = PreTrainedModel
else:
    Base = object


class HyperConnectionComposite(Base):
    """Mixin before a family's base model with layers in an inner model, such as a language model.

    part_class: the class of the inner model.
    stack: the path of the layers.
    """

    part_class: type[HyperConnectionPreTrainedModel]
    stack = "language_model.layers"

    @classmethod
    def register_parts(cls, config) -> None:
        register_with_auto_model(config.connection_config, cls.part_class)

    def convert_layers(self) -> None:
        """Convert the layers of the inner model."""
        adopt(self.get_submodule(self.stack.partition(".")[0]), self.part_class)
        self.post_init()

    @property
    def decoder_layers(self) -> Any:
        """Return the layers of the inner model."""
        return self.get_submodule(self.stack)


class HyperConnectionOuterModel(Base):
    """Mixin before a family's base model with layers in inner models of its config: an encoder, a decoder.

    inner: classes of the inner models, by attribute.
    """

    inner: dict[str, type[PreTrainedModel]]

    def convert_layers(self) -> None:
        """Convert the layers of each inner model."""
        for name, model_class in self.inner.items():
            adopt(getattr(self, name), model_class)
        replace_norms(self, self.config)
        self.post_init()

    @property
    def decoder_layers(self) -> nn.ModuleList:
        """Return the layers of the last inner model."""
        return getattr(self, [*self.inner][-1]).decoder_layers
