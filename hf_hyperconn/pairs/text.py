"""The text of a family's two files."""

from collections.abc import Iterable
from textwrap import indent

from ..models.sub_layers import SUB_LAYERS, SubLayer
from .language_models import APART
from .source_files import release
from .sources import FamilySource, LanguageModel

WIDTH = 119
LICENCE = "# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0."


def stem(model_type: str) -> str:
    """What the names of a family's files end in."""
    return f"hc_{model_type.replace('-', '_')}"


def auto_map(family: FamilySource) -> dict[str, str]:
    """`file.Class` by Auto class, as in a config.json."""
    name = stem(family.model_type)
    return {
        "AutoConfig": f"configuration_{name}.HC{family.config}",
        **{
            "AutoModel" + suffix.removeprefix("Model"): f"modeling_{name}.HC{base}"
            for suffix, base in family.heads.items()
        },
    }


def configuration_text(family: FamilySource) -> str:
    """The file with the family's config."""
    if family.language_model is not None:
        return _composite_configuration(family, family.language_model.source)
    return f'''{LICENCE}
"""Configuration of {_title(family)} with hyper-connections."""

from huggingface_hub.dataclasses import strict

from .configuration_hyper_connections import HyperConnectionConfig
from .transformers_seam import names_are_gone

{_of_transformers(family.configuration, [family.config])}


@strict
class HC{family.config}(HyperConnectionConfig, {family.config}):
    """`{family.config}` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_{family.model_type}"
    base_model_type = "{family.model_type}"


__all__ = ["HC{family.config}"]
'''


def _composite_configuration(family: FamilySource, of_layers: FamilySource) -> str:
    return f'''{LICENCE}
"""Configuration of {_title(family)}, whose language model has hyper-connections."""

from huggingface_hub.dataclasses import strict

from .configuration_{stem(of_layers.model_type)} import HC{of_layers.config}
from .configuration_hyper_connections import HyperConnectionCompositeConfig
from .transformers_seam import names_are_gone

{_of_transformers(family.configuration, [family.config])}


@strict
class HC{family.config}(HyperConnectionCompositeConfig, {family.config}):
    """`{family.config}` with the fields of `HyperConnectionConfig` in its `text_config`."""

    model_type = "hc_{family.model_type}"
    base_model_type = "{family.model_type.partition(APART)[0]}"
    text_config_class = HC{of_layers.config}


__all__ = ["HC{family.config}"]
'''


def modeling_text(family: FamilySource) -> str:
    """The file with the family's models."""
    if family.language_model is not None:
        return _composite_modeling(family, family.language_model)
    names = sorted({family.layer, family.pretrained, *family.heads.values()} | _globals(family))
    mixins = ["HyperConnectionModel", "HyperConnectionPreTrainedModel"]
    of_streams = [*(["for_every_stream"] if family.between else []), "reduce_recorded_streams"]
    if len(family.heads) > 1:
        mixins.insert(0, "HyperConnectionHead")
    generation = ["from transformers import GenerationMixin"] if family.generative else []
    pretrained, layer, config = (f"HC{name}" for name in (family.pretrained, family.layer, family.config))
    parts = [
        "\n".join(
            [
                LICENCE,
                *_origin(family),
                f'"""{_title(family)} with hyper-connections."""',
                "",
                *([*generation, ""] if generation else []),
                _import(f".configuration_{stem(family.model_type)}", [config]),
                "from .hyper_connections_layer import HyperConnectionDecoderLayer",
                _import(".modeling_hyper_connections", mixins),
                _import(".residual_streams", of_streams),
                *(["from .sub_layers import SubLayer"] if family.cut.sub_layers != SUB_LAYERS else []),
                "from .transformers_seam import names_are_gone",
                "",
                _of_transformers(family.modeling, names),
            ]
        ),
        _class(layer, ["HyperConnectionDecoderLayer", family.layer], f"`{family.layer}` on residual streams.")
        + _of_layer(family),
        _class(
            pretrained,
            ["HyperConnectionPreTrainedModel", family.pretrained],
            f"What the HC-{_title(family)} classes share.",
        )
        + f"\n\n    config: {config}\n    decoder_layer_class = {layer}\n"
        + _assigned("auto_map", auto_map(family)),
    ]
    for base, generates in _classes(family).items():
        if base == family.heads["Model"]:
            bases, line = (
                ["HyperConnectionModel", pretrained, base],
                f"forward = reduce_recorded_streams({base}.forward)",
            )
            if family.stack != "layers":
                line = f"stack = {_shown(family.stack)}\n    {line}"
            if family.between:
                line += f"\n    {family.between} = for_every_stream({base}.{family.between})"
        else:
            bases = ["HyperConnectionHead", pretrained, base, *generates]
            line = f"model_class = HC{family.heads['Model']}"
        parts.append(_class(f"HC{base}", bases, f"`{base}` with hyper-connections.") + f"\n\n    {line}")
    return _file(family, parts)


def _composite_modeling(family: FamilySource, language_model: LanguageModel) -> str:
    classes, model = _classes(family), family.heads["Model"]
    generation = ["from transformers import GenerationMixin", ""] if family.generative else []
    pretrained, config, part = (f"HC{name}" for name in (family.pretrained, family.config, language_model.name))
    heads = ["HyperConnectionHead"] if len(classes) > 1 else []
    parts = [
        "\n".join(
            [
                LICENCE,
                f'"""{_title(family)}, whose language model has hyper-connections."""',
                "",
                *generation,
                _import(f".configuration_{stem(family.model_type)}", [config]),
                _import(f".modeling_{stem(language_model.source.model_type)}", [part]),
                _import(
                    ".modeling_hyper_connections",
                    ["HyperConnectionComposite", *heads, "HyperConnectionPreTrainedModel"],
                ),
                "from .transformers_seam import names_are_gone",
                "",
                _of_transformers(family.modeling, sorted({family.pretrained, *classes})),
            ]
        ),
        _class(
            pretrained,
            ["HyperConnectionPreTrainedModel", family.pretrained],
            f"What the HC-{_title(family)} classes share.",
        )
        + f"\n\n    config: {config}\n    decoder_layer_class = {part}.decoder_layer_class\n"
        + _assigned("auto_map", auto_map(family)),
    ]
    for base, generates in classes.items():
        if base == model:
            bases, lines = ["HyperConnectionComposite", pretrained, base], [f"language_model_class = {part}"]
            if family.stack != "language_model.layers":
                lines.append(f"stack = {_shown(family.stack)}")
        else:
            bases, lines = ["HyperConnectionHead", pretrained, base], [f"model_class = HC{model}"]
        body = "".join(f"\n    {line}" for line in lines)
        parts.append(_class(f"HC{base}", [*bases, *generates], f"`{base}` with hyper-connections.") + f"\n{body}")
    return _file(family, parts)


def _classes(family: FamilySource) -> dict[str, list[str]]:
    """The classes of a family, the base model first, and `GenerationMixin` for each that has `generate` from it."""
    return {base: ["GenerationMixin"] * (suffix in family.generative) for suffix, base in family.heads.items()}


def _file(family: FamilySource, parts: list[str]) -> str:
    exported = sorted({f"HC{family.pretrained}", *(f"HC{base}" for base in family.heads.values())})
    return "\n\n\n".join([*parts, "__all__ = [\n" + "".join(f'    "{name}",\n' for name in exported) + "]"]) + "\n"


def _title(family: FamilySource) -> str:
    return family.config.removesuffix("Config")


def _is_cut(family: FamilySource) -> bool:
    return not all(branch.is_usual for branch in family.cut.branches)


def _origin(family: FamilySource) -> list[str]:
    """Whose code the branches are."""
    if not _is_cut(family):
        return []
    return [
        f"# The branches of its layer are cut from Transformers {release()}, {family.modeling.rpartition('.')[2]}.py,",
        "# under the same licence, which names its authors.",
    ]


def _globals(family: FamilySource) -> set[str]:
    """What the branches in the file read of the globals of Transformers' file."""
    return {name for branch in family.cut.branches if not branch.is_usual for name in branch.names}


def _of_layer(family: FamilySource) -> str:
    """The body of the layer's class, after its docstring."""
    settings: dict[str, object] = {}
    if _is_cut(family):
        settings["cut_from"] = (release(), family.cut_from)
    if family.predicting_norm != "post_attention_layernorm":
        settings["predicting_norm"] = family.predicting_norm
    if not family.takes_index:
        settings["takes_index"] = False
    if family.positional:
        settings["positional"] = family.positional
    if family.cut.widened:
        settings["widened"] = family.cut.widened
    if family.cut.returned:
        settings["returned"] = family.cut.returned
    if family.cut.settings:
        settings["settings"] = dict(family.cut.settings)
    if family.cut.absent:
        settings["absent"] = family.cut.absent
    lines = [f"    {name} = {_shown(value)}" for name, value in settings.items()]
    if family.cut.sub_layers != SUB_LAYERS:
        lines.insert(0, f"    parts = {_parts(family.cut.sub_layers)}")
    text = "\n\n" + "\n".join(lines) if lines else ""
    for sub_layer, branch in zip(family.cut.sub_layers, family.cut.branches, strict=True):
        if not branch.is_usual:
            what = {"attention": "attention", "mlp": "the MLP"}.get(sub_layer.name, f"`{sub_layer.name}`")
            docstring = f"What {what} adds to the residual stream, `[B, S, D]` to `[B, S, D]`."
            method = branch.method(sub_layer.branch, docstring)
            text += "\n\n" + "\n".join(f"    {line}".rstrip() for line in method.rstrip("\n").splitlines())
    return text


def _parts(sub_layers: Iterable[SubLayer]) -> str:
    made = [f"SubLayer({', '.join(map(_shown, each))})" for each in sub_layers]
    return f"({made[0]},)" if len(made) == 1 else "(\n" + "".join(f"        {each},\n" for each in made) + "    )"


def _class(name: str, bases: list[str], docstring: str) -> str:
    line = f"class {name}({', '.join(bases)}):"
    if len(line) > WIDTH:
        inner = ", ".join(bases)
        inner = f"    {inner}\n" if len(inner) + 4 <= WIDTH else "".join(f"    {base},\n" for base in bases)
        line = f"class {name}(\n{inner}):"
    return f'{line}\n    """{docstring}"""'


def _import(module: str, names: Iterable[str], width: int = WIDTH) -> str:
    line = f"from {module} import {', '.join(names)}"
    lines = f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
    return line if len(line) <= width else lines


def _of_transformers(module: str, names: Iterable[str]) -> str:
    """An import that says what to do when a name is gone."""
    imported = indent(_import(f"transformers.models.{module}", names, WIDTH - 4), "    ")
    return f"try:\n{imported}\nexcept ImportError as error:\n    raise names_are_gone(error) from error"


def _assigned(name: str, values: dict[str, str]) -> str:
    items = "".join(f'        "{key}": "{value}",\n' for key, value in values.items())
    return f"    {name} = {{\n{items}    }}"


def _shown(value: object) -> str:
    """As Python writes it, with double quotes."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{_shown(key)}: {_shown(each)}' for key, each in value.items())}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_shown, value))}{',' * (len(value) == 1)})"
    return f'"{value}"' if isinstance(value, str) else repr(value)
