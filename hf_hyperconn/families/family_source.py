"""A family as Transformers' source describes it, with the branches cut from its layers, as plain data."""

from dataclasses import dataclass

from ..models.layer_source import CutFrom, digest_of_functions
from ..models.sub_layers import SUB_LAYERS, SubLayer
from .reading.inlining import Recorder
from .reading.source_files import Definition, FunctionSource
from .reading.stacks import TEXT

PLACE_MARK = ":"  # in the name of a model that another has in it and that has no model type of its own
STREAM = "hidden_states"
# in the names of modules that a branch isn't named after
UNNAMED = ("norm", "dropout", "drop_path", "act", "layer_scale", "ln_")
# shorter names for modules
SHORT_NAMES = {
    **{"encoder_attn": "cross_attn", "EncDecAttention": "cross_attn", "SelfAttention": "attn"},
    **{"fc1_fc2": "mlp", "DenseReluDense": "mlp", "per_layer_input_gate_per_layer_projection": "per_layer_input"},
}


@dataclass(frozen=True)
class Branch:
    """One branch, as a method of its layer.

    stream: the name of the residual stream in it.
    arguments: its other parameters, as in a signature.
    statements: its lines up to the addition, with their comments.
    result: the added expression.
    returned: names that it assigns, and that the layer returns or later branches read.
    names: globals of the layer's module that it reads.
    modules: the attributes of the layer that it calls.
    has_usual_statements: whether the statements are a norm, and attention or an MLP.
    given: the argument without which it is left out; None for none.
    after: statements that change the stream after the addition; "" for none.
    reads: whether it reads the stream; else it adds a value of an earlier branch.
    """

    stream: str
    arguments: tuple[str, ...]
    statements: str
    result: str
    returned: tuple[str, ...]
    names: frozenset[str]
    modules: tuple[str, ...]
    has_usual_statements: bool
    given: str | None = None
    after: str = ""
    reads: bool = True

    @property
    def is_usual(self) -> bool:
        """Tell whether the branch is norm + attention or norm + MLP, as in `HyperConnectionDecoderLayer`."""
        return self.has_usual_statements and self.result == STREAM and not self.returned and not self.after

    @property
    def name(self) -> str:
        """Return a name made of the modules that the branch runs."""
        modules = [name.removeprefix("self_") for name in self.modules if not any(word in name for word in UNNAMED)]
        name = "_".join(modules) or "block"
        return SHORT_NAMES.get(name, name)

    def method(self, name: str, docstring: str = "") -> str:
        """Write the branch as a method, indented as at the top of a module."""
        parameters = ("self", self.stream, *self.arguments)
        head = f"def {name}({', '.join(parameters)}):"
        if len(head) > 100:
            lines = "".join(f"    {parameter},\n" for parameter in parameters)
            head = f"def {name}(\n{lines}):"
        also = ", ".join(f'"{name}": {name}' for name in self.returned)
        result = f"return {self.result}, {{{also}}}" if also else f"return {self.result}"
        return _function(head, docstring, f"{self.statements}\n{result}".strip())

    def method_after(self, name: str, docstring: str = "") -> str:
        """Write a method with the changes of a stream after the addition."""
        return _function(f"def {name}(self, {STREAM}):", docstring, f"{self.after}\nreturn {STREAM}")


def _function(head: str, docstring: str, body: str) -> str:
    lines = [*([f'"""{docstring}"""'] if docstring else []), *body.splitlines()]
    return "\n".join([head, *(f"    {line}".rstrip() for line in lines)]) + "\n"


@dataclass(frozen=True)
class Cut:
    """The branches of a layer, in the order in which they are added.

    widened: the attribute of the layer that makes the stream float32 first; None without one.
    returned: names that the layer returns after the stream, in a tuple; None for the stream alone.
    settings: fields of the config with the values that lead to these branches.
    absent: arguments of the layer that must be None.
    inlined: classes of modules whose statements are in the branches, so that they are not called.
    sources: functions besides the layer's forward whose statements are in the branches.
    """

    branches: tuple[Branch, ...]
    widened: str | None = None
    returned: tuple[str, ...] | None = None
    settings: tuple[tuple[str, object], ...] = ()
    absent: tuple[str, ...] = ()
    inlined: tuple[Definition, ...] = ()
    sources: tuple[FunctionSource, ...] = ()

    @property
    def sub_layers(self) -> tuple[SubLayer, ...]:
        """Return the sub-layers: two are attention and MLP; others have the name of their module."""
        sub_layers: list[SubLayer] = []
        for place, branch in enumerate(self.branches):
            name = branch.name
            if any(sub_layer.name == name for sub_layer in sub_layers):
                name = f"{name}_{place}"
            usual = SUB_LAYERS[place] if len(self.branches) == len(SUB_LAYERS) else None
            sub_layer = usual or SubLayer(f"{name}_hc", f"{name}_branch", name)
            after = f"after_{sub_layer.name}" if branch.after else None
            sub_layers.append(sub_layer._replace(given=branch.given, after=after, reads=branch.reads))
        return tuple(sub_layers)


@dataclass(frozen=True)
class FamilySource:
    """A family, from which its two files are written.

    configuration, modeling: the modules of its classes, from `transformers.models`.
    config, pretrained: names of its classes.
    in_heads: attribute of the base model in heads, as `model`; None if the source does not tell.
    layers: the classes of its layers, which have the same sub-layers.
    renamed: its config's names of fields, by their usual names.
    heads: the name of its class behind each Auto class, by suffix, the base model first.
    generative: suffixes of the heads that get `generate` from a base of their own.
    stack: path of the layers in the base model, as `layers` or `encoder.layers`.
    count: field of the config with the number of layers.
    modules: the attributes that the base model's own `__init__` sets, and the source of their values.
    loop: the class whose forward runs the layers, and the digest of the forward.
    between: a method of the base model that its forward may call on the stream between layers; None without one.
    layerdrop: the attribute with the rate at which training leaves layers out; None without one.
    recorders: places of recorded outputs whose modules are not called any more, by their key.
    sizes: the defaults of its config for the number of layers, hidden size and vocabulary, by their usual names.
    tied: whether output and input embeddings are one unless its config says otherwise.
    prefix: prefix of the names of its classes with hyper-connections, where two have one base.
    part: the inner model with the connections, such as the language model. The fields about layers are its own.
    inner: the encoder and the decoder with the layers. The fields about layers are the last one's.
    outer: the classes that make the inner models, the base model among them; other heads have a base model.
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
        """Return the path of each list of layers in the base model."""
        return tuple(f"{model.attribute}.{model.source.stack}" for model in self.inner) or (self.stack,)

    @property
    def tower(self) -> "InnerModel | None":
        """Return the inner model with the connections unless it is the language model; else None."""
        return self.part if self.part is not None and not self.part.reads_text else None

    @property
    def sub_layers(self) -> tuple[SubLayer, ...]:
        """Return the sub-layers of a layer."""
        return self.layers[0].cut.sub_layers

    @property
    def norm(self) -> dict[str, float]:
        """Return the initial value of each parameter of the norm that predicts dynamic coefficients."""
        return self.layers[0].norm

    @property
    def read(self) -> dict[str, str]:
        """Return the digest of each forward that was read, by class."""
        layers = {layer.name: layer.cut_from.functions[0] for layer in self.layers}
        nodes = {name: source.node for name, function in layers.items() if (source := FunctionSource.named(function))}
        nodes |= {
            module.name: module.own_method("forward")[0] for layer in self.layers for module in layer.cut.inlined
        }
        return {
            **dict([self.loop]),
            **{name: digest_of_functions([(node, "")], spelled=True) for name, node in nodes.items()},
        }

    @property
    def settings(self) -> dict[str, object]:
        """Return the fields of the config with the values that lead to the cut branches."""
        return {name: value for layer in self.layers for name, value in layer.cut.settings}


@dataclass(frozen=True)
class LayerSource:
    """A class of layers.

    name: of the class.
    cut: its branches.
    cut_from: the source of its branches.
    positional: names of the arguments, besides the stream, that the model passes by their place.
    packed: whether it accepts the tokens of all sequences one after the other.
    channels_first: whether its hidden states lie channel after channel in memory.
    predicting_norm: attribute of the norm that predicts dynamic coefficients; None without one.
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
        """Tell whether branches are cut from the class; else `HyperConnectionDecoderLayer` has the branches."""
        return not all(branch.is_usual for branch in self.cut.branches)


@dataclass(frozen=True)
class InnerModel:
    """An inner model with the layers.

    attribute: attribute of the base model.
    name: name of its class.
    source: its family.
    field: field of the outer config with its own config; "" where both share one config.
    """

    attribute: str
    name: str
    source: FamilySource
    field: str = ""

    @property
    def reads_text(self) -> bool:
        """Tell whether the model is the language model."""
        return self.field == TEXT
