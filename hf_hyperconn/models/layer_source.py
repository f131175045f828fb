# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The comparison of the installed Transformers with the functions that the branches of a layer were cut from.

Only source is compared; no weights are read and nothing is computed. Two sources are the same if they differ only in
comments, layout, docstrings, annotations, decorators that deprecate or document, and the name of the cache.
"""

import ast
import hashlib
import inspect
import textwrap
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any, NamedTuple

# names of the argument with the keys and values of earlier tokens, in releases and modules of Transformers
CACHE_NAMES = ("cache", "past_key_values", "past_key_value", "cache_params", "layer_past")
IGNORED_FIELDS = ("annotation", "returns", "type_comment", "type_params", "ctx", "kind")
IGNORED_DECORATORS = ("deprecate_kwarg", "auto_docstring")


class CutFrom(NamedTuple):
    """The functions that branches were cut from.

    release: of Transformers.
    functions: as `module:Class.function`, with modules from `transformers.models`. In a function that runs layers,
        only the loop over them counts: `module:Class.function:attribute of the layers`. In an `__init__` only
        assignments from the config count.
    same: digest of their source with any name of the cache.
    spelled: digest of their source with its own names of the cache.
    """

    release: str
    functions: tuple[str, ...]
    same: str
    spelled: str

    def fit(self, layer: Any, forward: Callable, installed: str) -> None:
        """Rename the cache where the installed Transformers and the branches of a layer name it differently.

        forward: the layer's forward in Transformers.
        installed: the installed release of Transformers.

        Raises `SourceDiffersError` when the installed Transformers has another layer than branches were cut from.
        """
        if not has_other_cache_names(self, installed):
            return
        given = cache_name(forward)
        branches = (cache_name(getattr(type(layer), part.branch)) for part in layer.parts)
        accepted = next((name for name in (*branches, *layer.positional) if name in CACHE_NAMES), None)
        if given is not None and accepted is not None and given != accepted:
            layer.cache_names = given, accepted
        for module in layer.modules():
            if module is not layer and (name := cache_name(type(module).forward)) is not None:
                module.register_forward_pre_hook(CacheNamedAs(name), with_kwargs=True)


class SourceDiffersError(ImportError):
    """The installed Transformers differs from the source of the branches."""


@cache
def has_other_cache_names(cut: CutFrom, installed: str) -> bool:
    """Tell whether the installed Transformers has another name for the cache in the functions of `cut`.

    installed: its release. For the release of `cut` no source is read.

    Raises `SourceDiffersError` when these functions differ by more, or their source can't be read.
    """
    if cut.release == installed:
        return False
    try:
        functions = [_parsed(function) for function in cut.functions]
    except (ImportError, AttributeError, OSError, TypeError, SyntaxError, ValueError) as error:
        raise SourceDiffersError(_refusal(cut, installed, f"can't be read there ({error})")) from error
    if digest_of_functions(functions, spelled=True) == cut.spelled:
        return False
    if digest_of_functions(functions) == cut.same:
        return True
    raise SourceDiffersError(_refusal(cut, installed, "differ"))


def digest_of_functions(functions: Iterable[tuple[ast.AST, str]], *, spelled: bool = False) -> str:
    """Return the first 16 digits of the SHA-256 of functions, by their syntax.

    functions: each with the attribute of the layers that it runs; "" for a function that counts as a whole.
    spelled: whether the names of the cache count.
    """
    names = () if spelled else CACHE_NAMES
    lines = [line for function, layers in functions for line in _facts(function, layers, names)]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def cache_name(function: Callable) -> str | None:
    """Return the name of the cache among the arguments of a function; None without any, or without a signature."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return None
    return next((name for name in CACHE_NAMES if name in parameters), None)


class CacheNamedAs:
    """A hook before a module's forward that passes the cache by the name that the forward accepts."""

    def __init__(self, name: str):
        self.name = name

    def __call__(self, module: Any, args: tuple, kwargs: dict) -> tuple[tuple, dict]:
        return args, {self.name if key in CACHE_NAMES else key: value for key, value in kwargs.items()}


def _parsed(function: str) -> tuple[ast.AST, str]:
    module, path, *layers = function.split(":")
    parsed: Any = attrgetter(path)(import_module(f"transformers.models.{module}"))
    return ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(parsed)))).body[0], "".join(layers)


def _facts(function: ast.AST, layers: str, names: tuple[str, ...]) -> Iterator[str]:
    """Iterate over the text of the syntax that counts, which is the same with every release of Python."""
    for node in ast.walk(function):
        if layers and isinstance(node, ast.For) and any(_is_attribute(child, layers) for child in ast.walk(node.iter)):
            targets = {child.id for child in ast.walk(node.target) if isinstance(child, ast.Name)}
            yield _written(node, names, targets)
        elif getattr(function, "name", "") == "__init__" and _takes_from_config(node):
            yield _written(node, names)
    if not layers and getattr(function, "name", "") != "__init__":
        yield _written(function, names)


def _is_attribute(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Attribute) and node.attr == name


def _takes_from_config(node: ast.AST) -> bool:
    """Tell whether a node is `self.name = ...` without a call, which would make a module."""
    match node:
        case ast.Assign([ast.Attribute(ast.Name("self"))], value) | ast.AnnAssign(
            ast.Attribute(ast.Name("self")), value=ast.expr() as value
        ):
            return not any(isinstance(child, ast.Call) for child in ast.walk(value))
    return False


def _only_drops_layers(node: ast.AST) -> bool:
    """Tell whether a node is an `if` that leaves out layers at random in training, as connections never do."""
    if not isinstance(node, ast.If) or not any(_is_attribute(child, "training") for child in ast.walk(node.test)):
        return False
    for child in (inner for statement in node.body for inner in ast.walk(statement)):
        match child:
            case ast.Assign([ast.Name()], value):
                if any(isinstance(part, ast.Name) for part in _arguments(value)):
                    return False
            case ast.stmt() if not isinstance(child, ast.If | ast.Continue):
                return False
    return not node.orelse


def _arguments(value: ast.expr) -> Iterator[ast.AST]:
    """Iterate over the nodes of an expression, or of the arguments of a call."""
    if isinstance(value, ast.Call):
        yield from (part for argument in (*value.args, *value.keywords) for part in ast.walk(argument))
    else:
        yield from ast.walk(value)


def _written(node: Any, names: tuple[str, ...], called: Collection[str] = ()) -> str:
    """Return a node as text.

    names: strings that are written alike.
    called: names of layers; the values of keyword arguments in their calls don't count.
    """
    if isinstance(node, list):
        return f"[{','.join(_written(item, names, called) for item in node)}]"
    if not isinstance(node, ast.AST):
        return repr(names[0] if isinstance(node, str) and node in names else node)
    fields = dict(ast.iter_fields(node))
    if isinstance(node, ast.AnnAssign):
        if node.value is None:
            return ""
        return _written(ast.Assign([node.target], node.value), names, called)
    if called and _only_drops_layers(node):
        attributes = (part for part in ast.walk(node) if isinstance(part, ast.Attribute))
        own = {part.attr for part in attributes if isinstance(part.value, ast.Name) and part.value.id == "self"}
        return f"drops by {sorted(own)}"
    if isinstance(node, ast.FunctionDef):
        has_docstring = ast.get_docstring(node, clean=False) is not None
        fields["body"] = node.body[1:] if has_docstring else node.body
        fields["decorator_list"] = [part for part in node.decorator_list if not _is_ignored(part)]
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in called:
        keywords = sorted(_written(keyword.arg, names) for keyword in node.keywords)
        return f"{node.func.id}({_written(node.args, names, called)},{keywords})"
    written = (
        f"{name}={_written(value, names, called)}"
        for name, value in fields.items()
        if name not in IGNORED_FIELDS and value not in (None, [])
    )
    return f"{type(node).__name__}({','.join(written)})"


def _is_ignored(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Name) and called.id in IGNORED_DECORATORS


def _refusal(cut: CutFrom, installed: str, how: str) -> str:
    functions = ", ".join(function.split(":")[1] for function in cut.functions)
    return (
        f"the code of this model was cut from Transformers {cut.release}, whose {functions} {how} in the installed "
        f"{installed}. Install transformers=={cut.release}; or `pip install hf_hyperconn` and run `hf-hyperconn "
        f"refresh FOLDER`, which writes code for the installed release."
    )
