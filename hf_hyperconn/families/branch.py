"""A branch of a decoder layer and what else is cut from its `forward`, as plain data."""

from dataclasses import dataclass

from ..models.sub_layers import SUB_LAYERS, SubLayer
from .reading.source_files import Definition, Source

STREAM = "hidden_states"
# in the names of modules that a branch isn't named after
ASIDE = ("norm", "dropout", "drop_path", "act", "layer_scale", "ln_")
# shorter names for modules
SHORTER = {
    **{"encoder_attn": "cross_attn", "EncDecAttention": "cross_attn", "SelfAttention": "attn"},
    **{"fc1_fc2": "mlp", "DenseReluDense": "mlp", "per_layer_input_gate_per_layer_projection": "per_layer_input"},
}


@dataclass(frozen=True)
class Branch:
    """One branch, as a method of its layer.

    stream: the name by which it reads the residual stream.
    arguments: the names and defaults it takes besides that, as they are written in a signature.
    statements: its lines up to the addition, with their comments.
    result: the expression that was added.
    returned: the names it makes that the layer returns besides the stream, or that later branches read.
    names: what it reads that is neither its own nor the layer's: globals of the layer's module.
    modules: the attributes of the layer that it calls.
    has_usual_statements: whether those are a norm, and attention or an MLP.
    given: the argument without which it is left out; None for none.
    after: what then changes the stream; "" for nothing.
    reads: whether it reads the stream, or adds what an earlier branch has made.
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
        """Whether it is norm + attention or norm + MLP, as `HyperConnectionDecoderLayer` has it."""
        return self.has_usual_statements and self.result == STREAM and not self.returned and not self.after

    @property
    def name(self) -> str:
        """After the modules that it runs."""
        modules = [name.removeprefix("self_") for name in self.modules if not any(word in name for word in ASIDE)]
        name = "_".join(modules) or "block"
        return SHORTER.get(name, name)

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
        """Write a method that does to a stream what follows the addition."""
        return _function(f"def {name}(self, {STREAM}):", docstring, f"{self.after}\nreturn {STREAM}")


def _function(head: str, docstring: str, body: str) -> str:
    lines = [*([f'"""{docstring}"""'] if docstring else []), *body.splitlines()]
    return "\n".join([head, *(f"    {line}".rstrip() for line in lines)]) + "\n"


@dataclass(frozen=True)
class Cut:
    """The branches of a layer, in the order in which they are added.

    widened: the attribute of the layer that says whether the stream is made float32 first; None where none does.
    returned: what the layer returns after the stream, in a tuple; None where it returns the stream alone.
    settings: the value of each field of the config with which a layer has these branches.
    absent: arguments of the layer that must be None.
    inlined: the classes of modules of which the branches have statements, so that these are not called.
    sources: the functions, besides the layer's forward, that they have statements of.
    """

    branches: tuple[Branch, ...]
    widened: str | None = None
    returned: tuple[str, ...] | None = None
    settings: tuple[tuple[str, object], ...] = ()
    absent: tuple[str, ...] = ()
    inlined: tuple[Definition, ...] = ()
    sources: tuple[Source, ...] = ()

    @property
    def sub_layers(self) -> tuple[SubLayer, ...]:
        """The sub-layers: two are attention and MLP, others are called after the module that they run."""
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
