"""The text of a family's two files."""

import re
from collections.abc import Iterable, Sequence
from textwrap import indent

from ..models.layer_source import CutFrom
from ..models.sub_layers import SUB_LAYERS, SubLayer
from .family_source import FamilySource, InnerModel, LayerSource
from .reading.classes import FamilyName, auto_class
from .reading.source_files import release

LICENSE = "# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0."
WIDTH = 119
# the settings of a class of layers that most classes leave at these values
USUAL_SETTINGS = {"predicting_norm": "post_attention_layernorm", "count": "num_hidden_layers"}


def stem(model_type: str) -> str:
    """Return the end of the names of a family's files."""
    return "hc_" + re.sub(r"[-.]", "_", model_type)


def auto_map(family: FamilySource) -> dict[str, str]:
    """Return `file.Class` by Auto class, as in a config.json."""
    name = stem(family.model_type)
    return {
        "AutoConfig": f"configuration_{name}.HC{family.config}",
        **{auto_class(suffix): f"modeling_{name}.HC{base}" for suffix, base in family.heads.items()},
    }


def configuration_text(family: FamilySource) -> str:
    """Write the file with the family's config."""
    part, field, attributes = family.part, "", []
    if part is None:
        title, mixin = f"{_title(family)} with hyper-connections", "HyperConnectionConfig"
        imports = [import_of(".configuration_hyper_connections", [mixin])]
    else:
        title, mixin = (
            f"{_title(family)}, whose {_called(part)} has hyper-connections",
            "HyperConnectionCompositeConfig",
        )
        part_class, field = f"HC{part.source.config}", f" in its `{part.field}`"
        imports = [
            import_of(".configuration_composite", [mixin]),
            f"from .configuration_{stem(part.source.model_type)} import {part_class}",
        ]
        attributes = [f"part_class = {part_class}", *([] if part.reads_text else [f'part_field = "{part.field}"'])]
    body = [f'model_type = "hc_{family.model_type}"', f'base_model_type = "{FamilyName.of(family.model_type).own}"']
    imported, lines = "\n".join(imports), "".join(f"\n    {line}" for line in (*body, *attributes))
    return f'''{LICENSE}
"""Configuration of {title}."""

from huggingface_hub.dataclasses import strict

{imported}
from .transformers_seam import missing_names_error

{import_of_transformers(family.configuration, [family.config])}


@strict
class HC{family.config}({mixin}, {family.config}):
    """`{family.config}` with the fields of `HyperConnectionConfig`{field}."""
{lines}


__all__ = ["HC{family.config}"]
'''


def modeling_text(family: FamilySource) -> str:
    """Write the file with the family's models."""
    sources = [inner.source for inner in family.inner] or ([] if family.part else [family])
    exported = sorted({f"HC{family.pretrained}", *(f"HC{base}" for base in family.heads.values())})
    classes = [
        _head(family, sources),
        *(_layer_class(layer, source) for source in sources for layer in source.layers),
        _pretrained_class(family, sources),
        *(_inner_class(family, inner) for inner in (*family.inner, *family.of_backbone)),
        *(_model_class(family, base, generates) for base, generates in _classes(family).items()),
        "__all__ = [\n" + "".join(f'    "{name}",\n' for name in exported) + "]",
    ]
    return "\n\n\n".join(classes) + "\n"


def _head(family: FamilySource, sources: list[FamilySource]) -> str:
    """Write the imports of a file that has the layers of these sources."""
    part, layers = family.part, [layer for source in sources for layer in source.layers]
    has_cuts = any(layer.is_cut for layer in layers)
    origin = [
        f"# The branches of its layer are cut from Transformers {release()}, {family.modeling.rpartition('.')[2]}.py,",
        "# under the same license, which names its authors.",
    ]
    of_layer = [
        "HyperConnectionDecoderLayer",
        *(["for_every_stream"] if any(source.between for source in sources) else []),
        "reduce_recorded_streams",
    ]
    composite = [
        *(["HyperConnectionComposite"] if part else []),
        *(["HyperConnectionOuterModel"] if _inner_models(family) else []),
    ]
    mixins = [
        *(["HyperConnectionHead"] if {*_classes(family)} - {family.heads["Model"], *_inner_models(family)} else []),
        *(["HyperConnectionModel"] if sources else []),
        "HyperConnectionPreTrainedModel",
    ]
    names_sub_layers = any(layer.cut.sub_layers != SUB_LAYERS for layer in layers)
    return "\n".join(
        [
            LICENSE,
            *(origin if has_cuts else []),
            f'"""{_title(family)}{f", whose {_called(part)} has" if part else " with"} hyper-connections."""',
            "",
            *(["from transformers import GenerationMixin", ""] if any(_classes(family).values()) else []),
            import_of(f".configuration_{stem(family.model_type)}", [f"HC{family.config}"]),
            *([import_of(".decoder_layer", of_layer)] if sources else []),
            *(["from .layer_source import CutFrom"] if has_cuts else []),
            *([import_of(".modeling_composite", composite)] if composite else []),
            *([import_of(f".modeling_{stem(part.source.model_type)}", [f"HC{part.name}"])] if part else []),
            import_of(".modeling_hyper_connections", mixins),
            *(["from .sub_layers import SubLayer"] if names_sub_layers else []),
            "from .transformers_seam import missing_names_error",
            "",
            import_of_transformers(family.modeling, sorted(_names_of_transformers(family, sources))),
        ]
    )


def _names_of_transformers(family: FamilySource, sources: list[FamilySource]) -> set[str]:
    """Return the names that a file imports of Transformers' file."""
    names = {family.pretrained, *family.heads.values(), *(inner.name for inner in family.of_backbone)}
    for source in sources:
        names.add(source.heads["Model"])
        for recorder in source.recorders.values():
            names |= {"OutputRecorder", recorder.owner}
        for layer in source.layers:
            names.add(layer.name)
            names |= {name for branch in layer.cut.branches if not branch.is_usual for name in branch.names}
    return names


def _layer_class(layer: LayerSource, family: FamilySource) -> str:
    """Write a class of layers."""
    bases = ["HyperConnectionDecoderLayer", layer.name]
    text = class_head(f"HC{family.prefix}{layer.name}", bases, f"`{layer.name}` on residual streams.")
    settings = {
        "predicting_norm": layer.predicting_norm,
        "count": family.count,
        "positional": layer.positional or None,
        "packed": layer.packed or None,
        "channels_first": layer.channels_first or None,
        "widened": layer.cut.widened,
        "returned": layer.cut.returned,
        "settings": dict(layer.cut.settings) or None,
        "absent": layer.cut.absent or None,
    }
    lines = [_setting(name, value) for name, value in settings.items() if value != USUAL_SETTINGS.get(name)]
    if layer.is_cut:
        lines.insert(0, _cut_from(layer.cut_from))
    if layer.cut.sub_layers != SUB_LAYERS:
        lines.insert(0, f"    parts = {_sub_layers(layer.cut.sub_layers)}")
    text += "\n\n" + "\n".join(lines) if lines else ""
    for sub_layer, branch in zip(layer.cut.sub_layers, layer.cut.branches, strict=True):
        if not branch.is_usual:
            name = {"attention": "attention", "mlp": "the MLP"}.get(sub_layer.name, f"`{sub_layer.name}`")
            docstring = f"Return the addition of {name} to the residual stream, `[B, S, D]` to `[B, S, D]`."
            text += _method(branch.method(sub_layer.branch, docstring))
        if sub_layer.after is not None:
            docstring = "Change every stream after the addition, `[B, S, N, D]` to `[B, S, N, D]`."
            text += _method(branch.method_after(sub_layer.after, docstring))
    return text


def _setting(name: str, value: object) -> str:
    if isinstance(value, tuple):
        return written_list(f"{name} = ", map(literal, value), is_tuple=True)
    return f"    {name} = {literal(value)}"


def _cut_from(cut: CutFrom) -> str:
    functions = written_list("", map(literal, cut.functions), depth=2, is_tuple=True).lstrip()
    items = [literal(cut.release), functions, f"same={literal(cut.same)}", f"spelled={literal(cut.spelled)}"]
    return "    cut_from = CutFrom(\n" + "".join(f"        {item},\n" for item in items) + "    )"


def _sub_layers(sub_layers: Iterable[SubLayer]) -> str:
    items = []
    for sub_layer in sub_layers:
        defaults = sub_layer._field_defaults
        others = {name: value for name, value in sub_layer._asdict().items() if name in defaults}
        given = [f"{name}={literal(value)}" for name, value in others.items() if value != defaults[name]]
        items.append(written_list("SubLayer", [*map(literal, sub_layer[:3]), *given], depth=2, after=","))
    return f"({items[0].strip()})" if len(items) == 1 else "(\n" + "".join(f"{item}\n" for item in items) + "    )"


def _method(source: str) -> str:
    """Write a method in the body of a class."""
    return "\n\n" + "\n".join(f"    {line}".rstrip() for line in source.rstrip("\n").splitlines())


def _pretrained_class(family: FamilySource, sources: list[FamilySource]) -> str:
    bases = ["HyperConnectionPreTrainedModel", family.pretrained]
    line = f"layer_classes = HC{family.part.name}.layer_classes" if family.part else _layer_classes(sources)
    head = class_head(f"HC{family.pretrained}", bases, f"Base of the HC-{_title(family)} classes.")
    lines = [f"    config: HC{family.config}", f"    {line}", written_dict("auto_map", auto_map(family))]
    recorders = dict.fromkeys(item for source in sources for item in source.recorders.items())
    if recorders:
        items = [f"**{family.pretrained}._can_record_outputs"]
        for key, at in recorders:
            where = f'{at.owner}, index={at.place}, layer_name="{at.attribute}"'
            items.append(f'"{key}": OutputRecorder({where})')
        lines.append("".join(["    _can_record_outputs = {\n", *(f"        {item},\n" for item in items), "    }"]))
    return "\n".join([f"{head}\n", *lines])


def _layer_classes(sources: Sequence[FamilySource]) -> str:
    names = [f"HC{source.prefix}{layer.name}" for source in sources for layer in source.layers]
    return written_list("layer_classes = ", names, is_tuple=True).lstrip()


def _inner_class(family: FamilySource, inner: InnerModel) -> str:
    lines = [_layer_classes([inner.source]), *_base_model_lines(inner.source)]
    bases = ["HyperConnectionModel", f"HC{family.pretrained}", inner.name]
    return _class(inner.name, bases, lines, inner.source.prefix)


def _model_class(family: FamilySource, base: str, generates: list[str]) -> str:
    pretrained, part, inner = f"HC{family.pretrained}", family.part, _inner_models(family)
    if base in inner:
        items = (f"{literal(model.attribute)}: HC{model.source.prefix}{model.name}" for model in inner[base])
        mixin, lines = "HyperConnectionOuterModel", [f"inner = {{{', '.join(items)}}}"]
    elif base != family.heads["Model"]:
        mixin, lines = "HyperConnectionHead", [f"model_class = HC{family.heads['Model']}"]
    elif part:
        mixin, lines = "HyperConnectionComposite", [f"part_class = HC{part.name}"]
        lines += [f"stack = {literal(family.stack)}"] if family.stack != "language_model.layers" else []
    else:
        mixin, lines = "HyperConnectionModel", _base_model_lines(family)
    return _class(base, [mixin, pretrained, base, *generates], lines)


def _inner_models(family: FamilySource) -> dict[str, tuple[InnerModel, ...]]:
    """Return the inner models with layers, encoders and decoders, of each class that makes them itself."""
    inner = dict.fromkeys(family.outer, family.inner)
    return {**inner, family.heads["Backbone"]: family.of_backbone} if family.of_backbone else inner


def _base_model_lines(source: FamilySource) -> list[str]:
    """Return the lines about layers in the class of a base model."""
    base = source.heads["Model"]
    return [
        *([f"stack = {literal(source.stack)}"] if source.stack != "layers" else []),
        *([f"hc_layerdrop = {literal(source.layerdrop)}"] if source.layerdrop else []),
        f"forward = reduce_recorded_streams({base}.forward)",
        *([f"{source.between} = for_every_stream({base}.{source.between})"] if source.between else []),
    ]


def _class(base: str, bases: list[str], lines: list[str], prefix: str = "") -> str:
    body = "".join(f"\n    {line}" for line in lines)
    return class_head(f"HC{prefix}{base}", bases, f"`{base}` with hyper-connections.") + f"\n{body}"


def _classes(family: FamilySource) -> dict[str, list[str]]:
    """Return the classes of a family, the base model first, each with the `GenerationMixin` that it may need."""
    return {base: ["GenerationMixin"] * (suffix in family.generative) for suffix, base in family.heads.items()}


def _title(family: FamilySource) -> str:
    return family.config.removesuffix("Config")


def _called(part: InnerModel) -> str:
    return "language model" if part.reads_text else part.attribute.replace("_", " ")


def class_head(name: str, bases: list[str], docstring: str) -> str:
    """Write the first line of a class and its docstring."""
    return f'{written_list(f"class {name}", bases, depth=0, after=":")}\n    """{docstring}"""'


def import_of(module: str, names: Iterable[str], width: int = WIDTH) -> str:
    line = f"from {module} import {', '.join(names)}"
    lines = f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
    return line if len(line) <= width else lines


def import_of_transformers(module: str, names: Iterable[str]) -> str:
    """Write an import whose error names a remedy when a name is gone."""
    imported = indent(import_of(f"transformers.models.{module}", names, WIDTH - 4), "    ")
    return f"try:\n{imported}\nexcept ImportError as error:\n    raise missing_names_error(error) from error"


def written_dict(name: str, values: dict[str, str]) -> str:
    """Write the assignment of a dict in the body of a class."""
    items = "".join(f'        "{key}": "{value}",\n' for key, value in values.items())
    return f"    {name} = {{\n{items}    }}"


def written_list(head: str, items: Iterable[str], *, depth: int = 1, after: str = "", is_tuple: bool = False) -> str:
    """Write `head(items)`, in one line or several.

    depth: indentation, in steps of four. after: the text after the bracket.
    """
    items, space = [*items], "    " * depth
    line = f"{space}{head}({', '.join(items)}{',' * (is_tuple and len(items) == 1)}){after}"
    inner = f"{space}    {', '.join(items)}\n"
    if len(line) <= WIDTH:
        return line
    if len(inner) > WIDTH + 1 or is_tuple:
        inner = "".join(f"{space}    {item},\n" for item in items)
    return f"{space}{head}(\n{inner}{space}){after}"


def literal(value: object) -> str:
    """Write a value with double quotes."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal(key)}: {literal(item)}' for key, item in value.items())}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal, value))}{',' * (len(value) == 1)})"
    return f'"{value}"' if isinstance(value, str) else repr(value)
