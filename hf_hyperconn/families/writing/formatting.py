"""Pieces of Python, written as a formatter writes them."""

from collections.abc import Iterable
from textwrap import indent

WIDTH = 119


def class_head(name: str, bases: list[str], docstring: str) -> str:
    """Write the first line of a class and its docstring."""
    return f'{listed(f"class {name}", bases, depth=0, after=":")}\n    """{docstring}"""'


def import_of(module: str, names: Iterable[str], width: int = WIDTH) -> str:
    line = f"from {module} import {', '.join(names)}"
    lines = f"from {module} import (\n" + "".join(f"    {name},\n" for name in names) + ")"
    return line if len(line) <= width else lines


def import_of_transformers(module: str, names: Iterable[str]) -> str:
    """Write an import that says what to do when a name is gone."""
    imported = indent(import_of(f"transformers.models.{module}", names, WIDTH - 4), "    ")
    return f"try:\n{imported}\nexcept ImportError as error:\n    raise names_are_gone(error) from error"


def assigned(name: str, values: dict[str, str]) -> str:
    """Write the assignment of a dict in the body of a class."""
    items = "".join(f'        "{key}": "{value}",\n' for key, value in values.items())
    return f"    {name} = {{\n{items}    }}"


def listed(head: str, items: Iterable[str], *, depth: int = 1, after: str = "", is_tuple: bool = False) -> str:
    """Write `head(items)`, in as many lines as it needs.

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
    """Write a value with double quotes."""
    if isinstance(value, dict):
        return f"{{{', '.join(f'{shown(key)}: {shown(item)}' for key, item in value.items())}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(shown, value))}{',' * (len(value) == 1)})"
    return f'"{value}"' if isinstance(value, str) else repr(value)
