"""The name of a family: a model type, and which model in it has the layers, where that is not the usual one."""

from dataclasses import dataclass

from .source_files import table

APART = "__"


@dataclass(frozen=True)
class FamilyName:
    """The parts of a name such as `llava`, `llava__mistral` or `llava__siglip_vision_model__vision_tower`.

    own: the model type.
    chosen: the model type of the model that has the layers, where a config chooses another than the usual one.
    stack: the attribute of that model, where it is not the usual one: the vision tower of a model with a language
        model, or the encoder alone of an encoder-decoder.
    """

    own: str
    chosen: str | None = None
    stack: str | None = None

    @classmethod
    def of(cls, name: str) -> "FamilyName":
        """The parts of a name."""
        own, *rest = name.split(APART)
        chosen = rest.pop(0) if rest and rest[0] in table("CONFIG_MAPPING_NAMES") else None
        return cls(own, chosen, APART.join(rest) or None)

    def __str__(self) -> str:
        return APART.join(part for part in (self.own, self.chosen, self.stack) if part is not None)
