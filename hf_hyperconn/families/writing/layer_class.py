"""The text of a class of layers."""

from collections.abc import Iterable
from textwrap import indent

from ...models.layer_source import CutFrom
from ...models.sub_layers import SUB_LAYERS, SubLayer
from ..family_source import FamilySource, LayerSource


def is_cut(layer: LayerSource) -> bool:
    return not all(branch.is_usual for branch in layer.cut.branches)


def globals_read(layer: LayerSource) -> set[str]:
    """What the branches in the file read of the globals of Transformers' file."""
    return {name for branch in layer.cut.branches if not branch.is_usual for name in branch.names}


def layer_class(layer: LayerSource, family: FamilySource) -> str:
    """A class of layers of a family."""
    bases = ["HyperConnectionDecoderLayer", layer.name]
    return class_with(f"HC{family.prefix}{layer.name}", bases, f"`{layer.name}` on residual streams.") + _body(
        layer, family.count
    )


def _body(layer: LayerSource, count: str) -> str:
    """What follows the docstring."""
    settings: dict[str, object] = {}
    if layer.predicting_norm != "post_attention_layernorm":
        settings["predicting_norm"] = layer.predicting_norm
    if count != "num_hidden_layers":
        settings["count"] = count
    if layer.positional:
        settings["positional"] = layer.positional
    if layer.packed:
        settings["packed"] = True
    if layer.channels_first:
        settings["channels_first"] = True
    if layer.cut.widened:
        settings["widened"] = layer.cut.widened
    if layer.cut.returned is not None:
        settings["returned"] = layer.cut.returned
    if layer.cut.settings:
        settings["settings"] = dict(layer.cut.settings)
    if layer.cut.absent:
        settings["absent"] = layer.cut.absent
    lines = [_setting(name, value) for name, value in settings.items()]
    if is_cut(layer):
        lines.insert(0, _cut_from(layer.cut_from))
    if layer.cut.sub_layers != SUB_LAYERS:
        lines.insert(0, f"    parts = {_parts(layer.cut.sub_layers)}")
    text = "\n\n" + "\n".join(lines) if lines else ""
    for sub_layer, branch in zip(layer.cut.sub_layers, layer.cut.branches, strict=True):
        if not branch.is_usual:
            what = {"attention": "attention", "mlp": "the MLP"}.get(sub_layer.name, f"`{sub_layer.name}`")
            docstring = f"What {what} adds to the residual stream, `[B, S, D]` to `[B, S, D]`."
            method = branch.method(sub_layer.branch, docstring)
            text += _method(method)
        if sub_layer.after is not None:
            docstring = "What then becomes of each of the streams, `[B, S, N, D]` to `[B, S, N, D]`."
            text += _method(branch.method_after(sub_layer.after, docstring))
    return text


def _cut_from(cut: CutFrom) -> str:
    functions = listed("", map(shown, cut.functions), depth=2, is_tuple=True).lstrip()
    items = [shown(cut.release), functions, f"same={shown(cut.same)}", f"spelled={shown(cut.spelled)}"]
    return "    cut_from = CutFrom(\n" + "".join(f"        {each},\n" for each in items) + "    )"


def _setting(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return listed(f"{name} = ", map(shown, value), is_tuple=True)
    return f"    {name} = {shown(value)}"


def _method(source: str) -> str:
    """A method in the body of a class, after what stands before it."""
    return "\n\n" + "\n".join(f"    {line}".rstrip() for line in source.rstrip("\n").splitlines())


def _parts(sub_layers: Iterable[SubLayer]) -> str:
    made = []
    for each in sub_layers:
        defaults = each._field_defaults
        others = {name: value for name, value in each._asdict().items() if name in defaults}
        given = [f"{name}={shown(value)}" for name, value in others.items() if value != defaults[name]]
        made.append(listed("SubLayer", [*map(shown, each[:3]), *given], depth=2, after=","))
    return f"({made[0].strip()})" if len(made) == 1 else "(\n" + "".join(f"{each}\n" for each in made) + "    )"


WIDTH = 119


def class_with(name: str, bases: list[str], docstring: str) -> str:
    return f'{listed(f"class {name}", bases, depth=0, after=":")}\n    """{docstring}"""'


def import_of(module: str, names: Iterable[str], width: int = WIDTH) -> str:
    line = f"from {module} import {', '.join(names)}"
    lines = f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
    return line if len(line) <= width else lines


def import_of_transformers(module: str, names: Iterable[str]) -> str:
    """An import that says what to do when a name is gone."""
    imported = indent(import_of(f"transformers.models.{module}", names, WIDTH - 4), "    ")
    return f"try:\n{imported}\nexcept ImportError as error:\n    raise names_are_gone(error) from error"


def assigned(name: str, values: dict[str, str]) -> str:
    items = "".join(f'        "{key}": "{value}",\n' for key, value in values.items())
    return f"    {name} = {{\n{items}    }}"


def listed(head: str, items: Iterable[str], *, depth: int = 1, after: str = "", is_tuple: bool = False) -> str:
    """`head(items)`, in as many lines as it needs, as a formatter writes it.

    depth: how deep it is indented, in steps of four. after: what follows the bracket.
    """
    items, space = [*items], "    " * depth
    line = f"{space}{head}({', '.join(items)}{',' * (is_tuple and len(items) == 1)}){after}"
    inner = f"{space}    {', '.join(items)}\n"
    if len(line) <= WIDTH:
        return line
    if len(inner) > WIDTH + 1 or is_tuple:
        inner = "".join(f"{space}    {item},\n" for item in items)
    return f"{space}{head}(\n{inner}{space}){after}"


def shown(value: object) -> str:
    """As Python writes it, with double quotes."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{shown(key)}: {shown(each)}' for key, each in value.items())}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(shown, value))}{',' * (len(value) == 1)})"
    return f'"{value}"' if isinstance(value, str) else repr(value)
