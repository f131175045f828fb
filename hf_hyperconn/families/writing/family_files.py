"""The text of a family's two files."""

import re
from collections.abc import Sequence

from ...models.sub_layers import SUB_LAYERS
from ..family_source import FamilySource, InnerModel
from ..reading.classes import FamilyName, auto_class
from ..reading.source_files import release
from .layer_class import (
    assigned,
    class_with,
    globals_read,
    import_of,
    import_of_transformers,
    is_cut,
    layer_class,
    listed,
    shown,
)

LICENCE = "# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0."


def stem(model_type: str) -> str:
    """What the names of a family's files end in."""
    return "hc_" + re.sub(r"[-.]", "_", model_type)


def auto_map(family: FamilySource) -> dict[str, str]:
    """`file.Class` by Auto class, as in a config.json."""
    name = stem(family.model_type)
    return {
        "AutoConfig": f"configuration_{name}.HC{family.config}",
        **{auto_class(suffix): f"modeling_{name}.HC{base}" for suffix, base in family.heads.items()},
    }


def configuration_text(family: FamilySource) -> str:
    """The file with the family's config."""
    if family.part is not None:
        return _composite_configuration(family, family.part)
    return f'''{LICENCE}
"""Configuration of {_title(family)} with hyper-connections."""

from huggingface_hub.dataclasses import strict

from .configuration_hyper_connections import HyperConnectionConfig
from .transformers_seam import names_are_gone

{import_of_transformers(family.configuration, [family.config])}


@strict
class HC{family.config}(HyperConnectionConfig, {family.config}):
    """`{family.config}` with the fields of `HyperConnectionConfig`."""

    model_type = "hc_{family.model_type}"
    base_model_type = "{FamilyName.of(family.model_type).own}"


__all__ = ["HC{family.config}"]
'''


def _composite_configuration(family: FamilySource, part: InnerModel) -> str:
    of_layers = part.source
    field = "" if part.reads_text else f'\n    part_field = "{part.field}"'
    return f'''{LICENCE}
"""Configuration of {_title(family)}, whose {_called(part)} has hyper-connections."""

from huggingface_hub.dataclasses import strict

from .configuration_composite import HyperConnectionCompositeConfig
from .configuration_{stem(of_layers.model_type)} import HC{of_layers.config}
from .transformers_seam import names_are_gone

{import_of_transformers(family.configuration, [family.config])}


@strict
class HC{family.config}(HyperConnectionCompositeConfig, {family.config}):
    """`{family.config}` with the fields of `HyperConnectionConfig` in its `{part.field}`."""

    model_type = "hc_{family.model_type}"
    base_model_type = "{FamilyName.of(family.model_type).own}"
    part_class = HC{of_layers.config}{field}


__all__ = ["HC{family.config}"]
'''


def modeling_text(family: FamilySource) -> str:
    """The file with the family's models."""
    sources = [each.source for each in family.inner] or ([] if family.part else [family])
    return _file(
        family,
        [
            _head(family, sources),
            *(layer_class(layer, each) for each in sources for layer in each.layers),
            _pretrained(family, sources),
            *(_inner(family, each) for each in (*family.inner, *family.of_backbone)),
            *(_model(family, base, generates) for base, generates in _classes(family).items()),
        ],
    )


def _head(family: FamilySource, sources: list[FamilySource]) -> str:
    """What stands before the classes of a file in which the layers of these sources are."""
    whole = {family.heads["Model"], *_inner_models(family)}
    title, part, between = _title(family), family.part, any(each.between for each in sources)
    names = {family.pretrained, *family.heads.values(), *(each.name for each in family.of_backbone)}
    for each in sources:
        names |= {each.heads["Model"]}
        for recorder in each.recorders.values():
            names |= {"OutputRecorder", recorder.owner}
        for layer in each.layers:
            names |= {layer.name} | globals_read(layer)
    composite = [
        *(["HyperConnectionComposite"] if part else []),
        *(["HyperConnectionOuterModel"] if _inner_models(family) else []),
    ]
    mixins = [
        *(["HyperConnectionHead"] if {*_classes(family)} - whole else []),
        *(["HyperConnectionModel"] if sources else []),
        "HyperConnectionPreTrainedModel",
    ]
    of_layers = [
        "HyperConnectionDecoderLayer",
        *(["for_every_stream"] if between else []),
        "reduce_recorded_streams",
    ]
    cuts = any(is_cut(layer) for each in sources for layer in each.layers)
    names_sub_layers = any(layer.cut.sub_layers != SUB_LAYERS for each in sources for layer in each.layers)
    return "\n".join(
        [
            LICENCE,
            *(_origin(family) if cuts else []),
            f'"""{title}{f", whose {_called(part)} has hyper-connections" if part else " with hyper-connections"}."""',
            "",
            *(["from transformers import GenerationMixin", ""] if any(_classes(family).values()) else []),
            import_of(f".configuration_{stem(family.model_type)}", [f"HC{family.config}"]),
            *([import_of(".decoder_layer", of_layers)] if sources else []),
            *(["from .layer_source import CutFrom"] if cuts else []),
            *([import_of(".modeling_composite", composite)] if composite else []),
            *([import_of(f".modeling_{stem(part.source.model_type)}", [f"HC{part.name}"])] if part else []),
            import_of(".modeling_hyper_connections", mixins),
            *(["from .sub_layers import SubLayer"] if names_sub_layers else []),
            "from .transformers_seam import names_are_gone",
            "",
            import_of_transformers(family.modeling, sorted(names)),
        ]
    )


def _pretrained(family: FamilySource, sources: list[FamilySource]) -> str:
    bases = ["HyperConnectionPreTrainedModel", family.pretrained]
    line = f"layer_classes = HC{family.part.name}.layer_classes" if family.part else _layer_classes(sources)
    head = class_with(f"HC{family.pretrained}", bases, f"What the HC-{_title(family)} classes share.")
    lines = [f"    config: HC{family.config}", f"    {line}", assigned("auto_map", auto_map(family))]
    recorders = dict.fromkeys(each for source in sources for each in source.recorders.items())
    if recorders:
        own = f"**{family.pretrained}._can_record_outputs"
        moved = ((key, f'{at.owner}, index={at.place}, layer_name="{at.attribute}"') for key, at in recorders)
        items = [own, *(f'"{key}": OutputRecorder({where})' for key, where in moved)]
        lines.append("".join(["    _can_record_outputs = {\n", *(f"        {each},\n" for each in items), "    }"]))
    return "\n".join([f"{head}\n", *lines])


def _layer_classes(sources: Sequence[FamilySource]) -> str:
    names = [f"HC{each.prefix}{layer.name}" for each in sources for layer in each.layers]
    return listed("layer_classes = ", names, is_tuple=True).lstrip()


def _inner(family: FamilySource, inner: InnerModel) -> str:
    lines = [_layer_classes([inner.source]), *_of_stack(inner.source)]
    bases = ["HyperConnectionModel", f"HC{family.pretrained}", inner.name]
    return _written(inner.name, bases, lines, inner.source.prefix)


def _model(family: FamilySource, base: str, generates: list[str]) -> str:
    pretrained, part, inner = f"HC{family.pretrained}", family.part, _inner_models(family)
    if base in inner:
        made = ", ".join(f"{shown(each.attribute)}: HC{each.source.prefix}{each.name}" for each in inner[base])
        mixin, lines = "HyperConnectionOuterModel", [f"inner = {{{made}}}"]
    elif base != family.heads["Model"]:
        mixin, lines = "HyperConnectionHead", [f"model_class = HC{family.heads['Model']}"]
    elif part:
        mixin, lines = "HyperConnectionComposite", [f"part_class = HC{part.name}"]
        lines += [f"stack = {shown(family.stack)}"] if family.stack != "language_model.layers" else []
    else:
        mixin, lines = "HyperConnectionModel", _of_stack(family)
    return _written(base, [mixin, pretrained, base, *generates], lines)


def _inner_models(family: FamilySource) -> dict[str, tuple[InnerModel, ...]]:
    """The models that have the layers, of each class that makes them itself: encoders, decoders."""
    made = dict.fromkeys(family.outer, family.inner)
    return {**made, family.heads["Backbone"]: family.of_backbone} if family.of_backbone else made


def _of_stack(source: FamilySource) -> list[str]:
    """What the class of a base model says of its layers."""
    base = source.heads["Model"]
    return [
        *([f"stack = {shown(source.stack)}"] if source.stack != "layers" else []),
        *([f"hc_layerdrop = {shown(source.layerdrop)}"] if source.layerdrop else []),
        f"forward = reduce_recorded_streams({base}.forward)",
        *([f"{source.between} = for_every_stream({base}.{source.between})"] if source.between else []),
    ]


def _written(base: str, bases: list[str], lines: list[str], prefix: str = "") -> str:
    body = "".join(f"\n    {line}" for line in lines)
    return class_with(f"HC{prefix}{base}", bases, f"`{base}` with hyper-connections.") + f"\n{body}"


def _classes(family: FamilySource) -> dict[str, list[str]]:
    """The classes of a family, the base model first, and `GenerationMixin` for each that has `generate` from it."""
    return {base: ["GenerationMixin"] * (suffix in family.generative) for suffix, base in family.heads.items()}


def _file(family: FamilySource, parts: list[str]) -> str:
    exported = sorted({f"HC{family.pretrained}", *(f"HC{base}" for base in family.heads.values())})
    return "\n\n\n".join([*parts, "__all__ = [\n" + "".join(f'    "{name}",\n' for name in exported) + "]"]) + "\n"


def _title(family: FamilySource) -> str:
    return family.config.removesuffix("Config")


def _called(part: InnerModel) -> str:
    return "language model" if part.reads_text else part.attribute.replace("_", " ")


def _origin(family: FamilySource) -> list[str]:
    """Whose code the branches are."""
    return [
        f"# The branches of its layer are cut from Transformers {release()}, {family.modeling.rpartition('.')[2]}.py,",
        "# under the same licence, which names its authors.",
    ]
