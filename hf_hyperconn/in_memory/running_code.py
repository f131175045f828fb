"""The source of running methods.

A conversion reads the source of a layer, and of the model around it. A function that replaces or wraps a method is not
in their file.
"""

import ast
import inspect
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cache
from types import CodeType, FunctionType
from typing import Any

from ..errors import UnsupportedCheckpointError

# packages whose decorators change no result: checkpointing, names of arguments, recorded outputs
LIBRARIES = ("transformers", "diffusers")


@dataclass(frozen=True)
class RunningCode:
    """A running method.

    function: the method without decorators.
    definition: its definition in `source`, the text of a whole file.
    class_name: the class around the definition; "" for a function outside of classes.
    """

    function: FunctionType
    definition: ast.FunctionDef
    source: str
    class_name: str


def running_code(cls: type, decorated_by: Collection[str] | None = LIBRARIES) -> RunningCode:
    """Return the running forward of a class, with the source that it was compiled from.

    decorated_by: packages whose decorators it may have; None for any.

    Raises `UnsupportedCheckpointError` without a source, and for another decorator.
    """
    method, function = f"{cls.__name__}.forward", getattr(cls, "forward", None)
    while (inner := getattr(function, "__wrapped__", None)) is not None:
        if decorated_by is not None and (package := package_of(function)) not in decorated_by:
            raise patch_refusal(method, f"it is wrapped by a function of {package or 'another package'}")
        function = inner
    if not isinstance(function, FunctionType):
        raise UnsupportedCheckpointError(f"the source of {cls.__name__} can't be read.")
    try:
        source = "".join(inspect.findsource(function)[0])
        candidates = _functions(source).get(function.__code__.co_name, [])
    except (OSError, SyntaxError) as error:
        raise UnsupportedCheckpointError(f"the source of {cls.__name__} can't be read.") from error
    for definition, class_name, code in candidates:
        if code == function.__code__:
            return RunningCode(function, definition, source, class_name)
    raise patch_refusal(method, "its file has no function of this code")


def package_of(function: Any) -> str:
    """Return the package of a function's code, whatever `functools.wraps` names; "" for another object."""
    return str(getattr(function, "__globals__", {}).get("__name__", "")).partition(".")[0]


def patch_refusal(method: str, reason: str) -> UnsupportedCheckpointError:
    """Return the error to raise for a method that its source does not show."""
    return UnsupportedCheckpointError(
        f"{method} is not the code that its source shows: {reason}. A conversion would lose that. Convert without the "
        f"patch or decorator."
    )


@cache
def _functions(source: str) -> dict[str, list[tuple[ast.FunctionDef, str, CodeType]]]:
    """Return the functions of a file by their names, each with its class and its code."""
    module = compile(source, "", "exec", dont_inherit=True)
    codes = {(code.co_name, code.co_firstlineno): code for code in _codes(module)}
    functions: dict[str, list[tuple[ast.FunctionDef, str, CodeType]]] = {}
    for node, class_name in _definitions(ast.parse(source)):
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        if (code := codes.get((node.name, first))) is not None:
            functions.setdefault(node.name, []).append((node, class_name, code))
    return functions


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def _definitions(parent: ast.AST, class_name: str = "") -> Iterator[tuple[ast.FunctionDef, str]]:
    for node in ast.iter_child_nodes(parent):
        if isinstance(node, ast.FunctionDef):
            yield node, class_name
        yield from _definitions(node, node.name if isinstance(node, ast.ClassDef) else class_name)
