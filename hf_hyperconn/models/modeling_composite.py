# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Models that have their layers in another model, or in several: a language model, an encoder and a decoder."""

from typing import TYPE_CHECKING, Any

from torch import nn
from transformers import PreTrainedModel

from .chosen_code import replace_norms
from .modeling_hyper_connections import HyperConnectionPreTrainedModel, adopt, let_auto_model_find

if TYPE_CHECKING:  # what the mixins below stand before
    Base = PreTrainedModel
else:
    Base = object


class HyperConnectionComposite(Base):
    """Mixin before a family's base model that has another model in it, with the layers: its language model.

    part_class: of that model.
    stack: where it has its layers.
    """

    part_class: type[HyperConnectionPreTrainedModel]
    stack = "language_model.layers"

    @classmethod
    def register_parts(cls, config) -> None:
        let_auto_model_find(config.of_layers, cls.part_class)

    def connect(self) -> None:
        """Make that model one on residual streams."""
        adopt(self.get_submodule(self.stack.partition(".")[0]), self.part_class)
        self.post_init()

    @property
    def decoder_layers(self) -> Any:
        """The layers of that model."""
        return self.get_submodule(self.stack)


class HyperConnectionOuterModel(Base):
    """Mixin before a family's base model that has its layers in models of the same config: an encoder, a decoder.

    inner: the class of each, by its attribute.
    """

    inner: dict[str, type[PreTrainedModel]]

    def connect(self) -> None:
        """Make each of them one on residual streams."""
        for name, model_class in self.inner.items():
            adopt(getattr(self, name), model_class)
        replace_norms(self, self.config)
        self.post_init()

    @property
    def decoder_layers(self) -> nn.ModuleList:
        """The layers of the last of them."""
        return getattr(self, [*self.inner][-1]).decoder_layers
