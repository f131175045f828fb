"""Which model in another one has the layers, read from the source of its `__init__` and of its config."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from ...errors import UnsupportedCheckpointError
from .source_files import Definition, table

TEXT = "text_config"  # of the config, as Transformers' `get_text_config` has it
OF_PART = re.compile(r"(?:self\.)?config\.(\w+_config)")
AUTO = "AutoModel.from_config"
LISTS = ("layers", "layer", "blocks", "block")


@dataclass(frozen=True)
class Part:
    """A model that another model has in it.

    attribute: of the other's base model.
    field: of the other's config, which it is made of.
    name: of its class; None where `AutoModel` finds it.
    """

    attribute: str
    field: str
    name: str | None

    @property
    def called(self) -> str:
        """What a message calls it."""
        return "language model" if self.field == TEXT else self.attribute


def find_parts(base: Definition) -> list[Part]:
    """Return the models in a base model that have configs of their own."""
    init = base.method("__init__")
    return [*_parts(init[0])] if init else []


def find_part(base: Definition, stack: str | None) -> Part | None:
    """Return the model in a base model that has the layers: its language model; None for a base model without any.

    stack: the attribute of another one, as of a vision tower.

    Raises `UnsupportedCheckpointError` when the model reaches into it, or there is none at that attribute.
    """
    parts = find_parts(base)
    chosen = [part for part in parts if (part.field == TEXT if stack is None else part.attribute == stack)]
    if len(chosen) != 1:
        if stack is None:
            return None
        others = ", ".join(part.attribute for part in parts) or "one list of layers"
        raise UnsupportedCheckpointError(f"{base.name} has {others}, and no {stack!r:.40} with layers.")
    (part,) = chosen
    if _reaches_into(base, part.attribute):
        raise UnsupportedCheckpointError(f"{base.name} reaches into the layers of its {part.called}.")
    twins = [other.attribute for other in parts if other.field == part.field]
    if stack is not None and twins != [stack]:
        raise UnsupportedCheckpointError(f"{base.name} makes {' and '.join(twins)} of one config, {part.field}.")
    return part


def type_of_part(part: Part, config: Definition, chosen: str | None) -> str:
    """Return the model type of a part.

    chosen: the one that a config chooses; None for the usual one.

    Raises `UnsupportedCheckpointError` when the source does not tell it, or lets nothing be chosen.
    """
    if chosen and part.name is not None:
        raise UnsupportedCheckpointError(f"{config.name} takes nothing but a {part.name}, of no other model type.")
    if (model_type := chosen or usual_type(config, part.field)) is None:
        raise UnsupportedCheckpointError(f"the source of {config.name} does not tell which {part.called} it has.")
    return model_type


def _parts(init: ast.FunctionDef) -> Iterator[Part]:
    configs = {}
    for node in ast.walk(init):
        match node:
            case ast.Assign([ast.Name(variable)], value) if OF_PART.fullmatch(source := ast.unparse(value)):
                configs[variable] = source
    for node in ast.walk(init):
        match node:
            case ast.Assign(
                [ast.Attribute(ast.Name("self"), attribute)],
                ast.Call(called, [given], []) | ast.Call(called, [], [ast.keyword("config", given)]),
            ):
                text, name = ast.unparse(given), ast.unparse(called)
                if of_part := OF_PART.fullmatch(configs.get(text, text)):
                    yield Part(attribute, of_part[1], None if name == AUTO else name.removesuffix("._from_config"))


def usual_type(config: Definition, field: str) -> str | None:
    """Return the model type of a field, where a config names none."""
    types = {name: model_type for model_type, name in table("CONFIG_MAPPING_NAMES").items()}
    for definition in config.lineage():
        for node in definition.node.body:
            match node:
                case ast.Assign([ast.Name("sub_configs_defaults" | "sub_configs")], ast.Dict(keys, values)):
                    for key, value in zip(keys, values, strict=True):
                        if isinstance(key, ast.Constant) and key.value == field:
                            return _type_of(value, types)
    return None


def _type_of(value: ast.expr, types: dict[str, str]) -> str | None:
    """Return the model type of a config class or of `SubConfigSpec(config_class=..., model_type=...)`."""
    if isinstance(value, ast.Call):
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        if isinstance(model_type := given.get("model_type"), ast.Constant):
            return cast("str | None", model_type.value)
        value = given.get("config_class", value)
    return types.get(ast.unparse(value))


def _reaches_into(base: Definition, attribute: str) -> bool:
    """Tell whether a model uses the layers of a model in it itself."""
    return any(
        isinstance(node, ast.Attribute) and node.attr in LISTS and f".{attribute}." in ast.unparse(node)
        for definition in base.lineage()
        for node in ast.walk(definition.node)
    )
