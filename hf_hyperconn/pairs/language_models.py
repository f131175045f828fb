"""Which part of a model is its language model, read from the source of its `__init__` and of its config."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from ..errors import UnsupportedCheckpointError
from .source_files import Definition, table

FIELD = "text_config"  # of the config, as Transformers' `get_text_config` has it
APART = "__"  # in a name made of two model types
AUTO = "AutoModel.from_config"


@dataclass(frozen=True)
class Part:
    """A language model that another model has in it.

    attribute: of the other's base model.
    name: of its class; None where `AutoModel` finds it.
    model_type: of its config.
    """

    attribute: str
    name: str | None
    model_type: str


def find_language_model(base: Definition, config: Definition, chosen: str) -> Part | None:
    """The language model that a base model has in it; None for a model without any.

    chosen: the model type that a config chooses; "" for the usual one.

    Raises `UnsupportedCheckpointError` when the source does not tell of what type it is, or the model reaches into it.
    """
    made = base.method("__init__")
    found = [*_parts(made[0])] if made else []
    if len(found) != 1:
        return None
    (attribute, called) = found[0]
    if called != AUTO and chosen:
        return None
    name = None if called == AUTO else called.removesuffix("._from_config")
    model_type = chosen or _usual_type(config)
    if model_type is None:
        raise UnsupportedCheckpointError(f"the source of {config.name} does not tell which language model it has.")
    if _reaches_into(base, attribute):
        raise UnsupportedCheckpointError(f"{base.name} reaches into the layers of its language model.")
    return Part(attribute, name, model_type)


def _parts(init: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Each attribute that is made of the field, and what is called for it."""
    written = f"config.{FIELD}"
    of_text = {written, *(names for names, value in _assigned(init) if value == written)}
    for node in ast.walk(init):
        match node:
            case ast.Assign(
                [ast.Attribute(ast.Name("self"), attribute)],
                ast.Call(called, [given], []) | ast.Call(called, [], [ast.keyword("config", given)]),
            ) if ast.unparse(given) in of_text:
                yield attribute, ast.unparse(called)


def _assigned(init: ast.FunctionDef) -> Iterator[tuple[str, str]]:
    """Each `name = value` of a function, as it is written."""
    for node in ast.walk(init):
        match node:
            case ast.Assign([ast.Name(name)], value):
                yield name, ast.unparse(value)


def _usual_type(config: Definition) -> str | None:
    """The model type of the field, where a config names none."""
    types = {name: model_type for model_type, name in table("CONFIG_MAPPING_NAMES").items()}
    for definition in config.lineage():
        for node in definition.node.body:
            match node:
                case ast.Assign([ast.Name("sub_configs_defaults" | "sub_configs")], ast.Dict(keys, values)):
                    for key, value in zip(keys, values, strict=True):
                        if isinstance(key, ast.Constant) and key.value == FIELD:
                            return _type_of(value, types)
    return None


def _type_of(value: ast.expr, types: dict[str, str]) -> str | None:
    """A model type, of a config class or of `SubConfigSpec(config_class=..., model_type=...)`."""
    if isinstance(value, ast.Call):
        given = {keyword.arg: keyword.value for keyword in value.keywords}
        if isinstance(named := given.get("model_type"), ast.Constant):
            return cast("str | None", named.value)
        value = given.get("config_class", value)
    return types.get(ast.unparse(value))


def _reaches_into(base: Definition, attribute: str) -> bool:
    """Whether a model uses the layers of its language model itself."""
    return any(
        isinstance(node, ast.Attribute) and node.attr == "layers" and f".{attribute}." in f"{ast.unparse(node)}"
        for definition in base.lineage()
        for node in ast.walk(definition.node)
    )
