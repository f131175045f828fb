"""How the norms of a decoder layer start, read from its source."""

import ast

from .source_files import Definition, SourceFile

NORMS_OF_TORCH = {"nn.RMSNorm": {"weight": 1.0}, "nn.LayerNorm": {"weight": 1.0, "bias": 0.0}}


def norm_of(layer: Definition) -> tuple[str | None, dict[str, float]]:
    """Return the attribute of the norm that predicts dynamic coefficients, and the start of its parameters.

    It is the norm before the MLP where there is one of the usual name, else the layer's first. It is None where the
    source tells of no norm how its parameters start; an RMSNorm of torch then stands for it.
    """
    init, file = layer.own_method("__init__")
    norms: dict[str, ast.expr] = {}
    for node in ast.walk(init):
        match node:
            case ast.Assign(targets=[ast.Attribute(ast.Name("self"), name)], value=value) if (
                "norm" in name or name.startswith("ln_")
            ):
                norms.setdefault(name, value)
    for name in ("post_attention_layernorm", *norms):
        if isinstance(call := norms.get(name), ast.Call) and (values := _start_of(call, file)) is not None:
            return name, values
    return None, NORMS_OF_TORCH["nn.RMSNorm"]


def _start_of(call: ast.Call, file: SourceFile) -> dict[str, float] | None:
    """Return the start of a norm's parameters; None when the source doesn't tell."""
    written = ast.unparse(call.func)
    if written in NORMS_OF_TORCH:
        affine = {"elementwise_affine": "True", "bias": "True"}
        settings = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg != "eps"}
        return NORMS_OF_TORCH[written] if settings.items() <= affine.items() else None
    if (definition := file.find(written)) is None:
        return None
    values: dict[str, float | None] = {}
    for ancestor in reversed([*definition.lineage()]):
        if _has_modules(ancestor.node):
            return None
        values |= next((NORMS_OF_TORCH[base] for base in ancestor.bases if base in NORMS_OF_TORCH), {})
        values |= _parameters(ancestor.node)
    known = {name: value for name, value in values.items() if value is not None}
    return known if len(known) == len(values) else None


def _has_modules(definition: ast.ClassDef) -> bool:
    """Tell whether it is made of other modules: `self.name = Class(...)`."""
    assigned = (node for node in ast.walk(definition) if isinstance(node, ast.Assign))
    calls = [node.value.func for node in assigned if isinstance(node.value, ast.Call)]
    return any(
        ast.unparse(call).rpartition(".")[2][:1].isupper() and "Parameter" not in ast.unparse(call) for call in calls
    )


def _parameters(definition: ast.ClassDef) -> dict[str, float | None]:
    """Return the start of each `self.name = nn.Parameter(torch.ones(...))`; None for another expression."""
    values = {}
    for node in ast.walk(definition):
        match node:
            case ast.Assign(
                targets=[ast.Attribute(ast.Name("self"), name)], value=ast.Call(func=called, args=[value, *_])
            ) if ast.unparse(called) in ("nn.Parameter", "torch.nn.Parameter"):
                function = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
                values[name] = {"torch.ones": 1.0, "torch.zeros": 0.0}.get(function)
    return values
