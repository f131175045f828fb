"""The text of the class of a family's layers."""

from collections.abc import Iterable

from ..models.sub_layers import SUB_LAYERS, SubLayer
from .source_files import release
from .sources import FamilySource
from .writing import class_with, shown


def is_cut(family: FamilySource) -> bool:
    return not all(branch.is_usual for branch in family.cut.branches)


def globals_read(family: FamilySource) -> set[str]:
    """What the branches in the file read of the globals of Transformers' file."""
    return {name for branch in family.cut.branches if not branch.is_usual for name in branch.names}


def layer_class(family: FamilySource) -> str:
    """The class of a family's layers."""
    bases = ["HyperConnectionDecoderLayer", family.layer]
    return class_with(f"HC{family.layer}", bases, f"`{family.layer}` on residual streams.") + _body(family)


def _body(family: FamilySource) -> str:
    """What follows the docstring."""
    settings = {}
    if is_cut(family):
        settings["cut_from"] = (release(), family.cut_from)
    if family.predicting_norm != "post_attention_layernorm":
        settings["predicting_norm"] = family.predicting_norm
    if family.count != "num_hidden_layers":
        settings["count"] = family.count
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
    lines = [f"    {name} = {shown(value)}" for name, value in settings.items()]
    if family.cut.sub_layers != SUB_LAYERS:
        lines.insert(0, f"    parts = {_parts(family.cut.sub_layers)}")
    text = "\n\n" + "\n".join(lines) if lines else ""
    for sub_layer, branch in zip(family.cut.sub_layers, family.cut.branches, strict=True):
        if not branch.is_usual:
            what = {"attention": "attention", "mlp": "the MLP"}.get(sub_layer.name, f"`{sub_layer.name}`")
            docstring = f"What {what} adds to the residual stream, `[B, S, D]` to `[B, S, D]`."
            method = branch.method(sub_layer.branch, docstring)
            text += _method(method)
        if branch.after:
            body = "".join(f"    {line}\n" for line in branch.after.splitlines())
            docstring = '    """What then becomes of each of the streams, `[B, S, N, D]` to `[B, S, N, D]`."""'
            head = f"def {sub_layer.after}(self, hidden_states):"
            text += _method(f"{head}\n{docstring}\n{body}    return hidden_states")
    return text


def _method(source: str) -> str:
    """A method in the body of a class, after what stands before it."""
    return "\n\n" + "\n".join(f"    {line}".rstrip() for line in source.rstrip("\n").splitlines())


def _parts(sub_layers: Iterable[SubLayer]) -> str:
    made = []
    for each in sub_layers:
        others = [f"{name}={shown(value)}" for name, value in each._asdict().items() if name in each._field_defaults]
        given = [text for text in others if not text.endswith("=None")]
        made.append(f"SubLayer({', '.join([*map(shown, each[:3]), *given])})")
    return f"({made[0]},)" if len(made) == 1 else "(\n" + "".join(f"        {each},\n" for each in made) + "    )"
