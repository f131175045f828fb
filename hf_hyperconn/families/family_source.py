"""A family as Transformers' source describes it, as plain data."""

from dataclasses import dataclass

from ..models.layer_source import CutFrom, digest
from ..models.sub_layers import SubLayer
from .branch import Cut
from .reading.composites import TEXT
from .reading.recorders import Recorder
from .reading.source_files import Source

INNER = ":"  # in the name of a model that another has in it and that has no model type of its own


@dataclass(frozen=True)
class FamilySource:
    """A family, of which its two files are written.

    configuration, modeling: the modules of its classes, from `transformers.models`.
    config, pretrained: names of its classes.
    in_heads: where heads have the base model, as `model`; None where the source does not say.
    layers: the classes of its layers, which have the same sub-layers.
    renamed: what its config calls fields, by the names that most families give them.
    heads: the name of its class behind each Auto class, by suffix, the base model first.
    generative: which of them have `generate` from a base of their own.
    stack: where the base model has its layers, as `layers` or `encoder.layers`.
    count: the field of the config that says how many.
    modules: the attributes that the base model's own `__init__` sets, and the source of their values.
    loop: the class whose forward runs the layers, and the digest of that.
    between: a method of the base model that its forward may call on the stream between layers; None without any.
    layerdrop: the attribute that says how often a layer is left out in training; None without any.
    recorders: where outputs are recorded that Transformers records at modules that are not called, by their key.
    sizes: the defaults of its config for the number of layers, hidden size and vocabulary, by their usual names.
    tied: whether output and input embeddings are one unless its config says otherwise.
    prefix: of the names of its classes with hyper-connections, where two have one base.
    part: the language model in it, or another model in it that has the connections instead. What is said of layers is
        said of this model's.
    inner: the encoder and the decoder that have its layers. What is said of layers is said of the last one's.
    outer: the classes that make those models, the base model among them; other heads have a base model.
    of_backbone: the encoder of a backbone that has no base model.
    """

    model_type: str
    configuration: str
    modeling: str
    config: str
    pretrained: str
    in_heads: str | None
    layers: "tuple[LayerSource, ...]"
    renamed: dict[str, str]
    heads: dict[str, str]
    generative: frozenset[str]
    stack: str
    count: str
    modules: dict[str, str]
    loop: tuple[str, str]
    between: str | None
    layerdrop: str | None
    recorders: dict[str, Recorder]
    sizes: dict[str, int]
    tied: bool = False
    prefix: str = ""
    part: "InnerModel | None" = None
    inner: "tuple[InnerModel, ...]" = ()
    outer: frozenset[str] = frozenset()
    of_backbone: "tuple[InnerModel, ...]" = ()

    @property
    def places(self) -> tuple[str, ...]:
        """Where the base model has its lists of layers."""
        return tuple(f"{model.attribute}.{model.source.stack}" for model in self.inner) or (self.stack,)

    @property
    def tower(self) -> "InnerModel | None":
        """The model in it that has the connections, where that is not its language model; None for others."""
        return self.part if self.part is not None and not self.part.reads_text else None

    @property
    def sub_layers(self) -> tuple[SubLayer, ...]:
        """The sub-layers of a layer."""
        return self.layers[0].cut.sub_layers

    @property
    def norm(self) -> dict[str, float]:
        """The initial value of each parameter of the norm that dynamic coefficients take."""
        return self.layers[0].norm

    @property
    def read(self) -> dict[str, str]:
        """The digest of the forward that was read, by the name of each class."""
        layers = {layer.name: layer.cut_from.functions[0] for layer in self.layers}
        nodes = {name: source.node for name, function in layers.items() if (source := Source.named(function))}
        nodes |= {
            module.name: module.own_method("forward")[0] for layer in self.layers for module in layer.cut.inlined
        }
        return {**dict([self.loop]), **{name: digest([(node, "")], spelled=True) for name, node in nodes.items()}}

    @property
    def settings(self) -> dict[str, object]:
        """The value of each field of the config with which layers have the branches that were cut."""
        return {name: value for layer in self.layers for name, value in layer.cut.settings}


@dataclass(frozen=True)
class LayerSource:
    """A class of layers.

    name: of the class.
    cut: its branches.
    cut_from: the source of its branches.
    positional: names of the arguments, besides the stream, that the model gives a layer by their place.
    packed: whether it takes the tokens of all sequences one after the other.
    channels_first: whether its hidden states lie channel after channel in memory.
    predicting_norm: the attribute that dynamic coefficients take their norm from; None without any.
    norm: the initial value of each parameter of that norm.
    """

    name: str
    cut: Cut
    cut_from: CutFrom
    positional: tuple[str, ...]
    packed: bool
    channels_first: bool
    predicting_norm: str | None
    norm: dict[str, float]

    @property
    def is_cut(self) -> bool:
        """Whether branches are cut from its source; otherwise it has those of `HyperConnectionDecoderLayer`."""
        return not all(branch.is_usual for branch in self.cut.branches)


@dataclass(frozen=True)
class InnerModel:
    """A model that another has in it, and that has the layers.

    attribute: of the base model.
    name: of its class.
    source: its family.
    field: of the whole's config, where it has a config of its own; "" where it has that of the whole.
    """

    attribute: str
    name: str
    source: FamilySource
    field: str = ""

    @property
    def reads_text(self) -> bool:
        """Whether it is the language model."""
        return self.field == TEXT
