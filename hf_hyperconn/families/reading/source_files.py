"""The files of the installed Transformers: parsed, never imported or run."""

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.machinery import PathFinder
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import UnsupportedCheckpointError


@cache
def package() -> Path:
    """Return the folder of the installed Transformers.

    Raises `UnsupportedCheckpointError` when there is none.
    """
    spec = PathFinder.find_spec("transformers")
    if spec is None or spec.origin is None:
        raise UnsupportedCheckpointError("Transformers is not installed: pip install transformers")
    return Path(spec.origin).parent


@cache
def release() -> str:
    """Return the version of the installed Transformers."""
    text = (package() / "__init__.py").read_text("utf-8")
    return next(re.finditer(r'^__version__ = "([^"]+)"', text, re.MULTILINE))[1]


@dataclass(frozen=True)
class Definition:
    """A class in a file of Transformers."""

    node: ast.ClassDef
    file: "SourceFile"

    @property
    def name(self) -> str:
        return self.node.name

    @property
    def bases(self) -> list[str]:
        """Return the names of the class's bases, as they are written."""
        return [ast.unparse(base) for base in self.node.bases]

    def lineage(self) -> Iterator["Definition"]:
        """Yield the class and its ancestors in Transformers, nearest first."""
        yield self
        for base in self.bases:
            if (definition := self.file.find(base)) is not None:
                yield from definition.lineage()

    def method(self, name: str) -> tuple[ast.FunctionDef, "SourceFile"] | None:
        """Return a method, own or inherited, and its file."""
        for definition in self.lineage():
            for node in definition.node.body:
                if isinstance(node, ast.FunctionDef) and node.name == name:
                    return node, definition.file
        return None

    def own_method(self, name: str) -> tuple[ast.FunctionDef, "SourceFile"]:
        """Return a method, as `method` does, that the class must have."""
        method = self.method(name)
        assert method is not None
        return method

    def constants(self) -> dict[str, Any]:
        """Return the constant defaults of its fields, own or inherited."""
        defaults: dict[str, Any] = {}
        for definition in reversed([*self.lineage()]):
            for node in definition.node.body:
                match node:
                    case ast.AnnAssign(ast.Name(name), value=ast.Constant(value)):
                        defaults[name] = value
        return defaults

    @property
    def pretrained(self) -> "Definition | None":
        """Return the family's `PreTrainedModel`, nearest first; None for a class that is no such model."""
        return next((definition for definition in self.lineage() if "PreTrainedModel" in definition.bases), None)

    def dict_of(self, name: str) -> ast.Dict:
        """Return the dict that a class body assigns to a name, own or inherited; empty without one."""
        return next((value for value in self._assigned(name) if isinstance(value, ast.Dict)), ast.Dict([], []))

    def string(self, name: str) -> str | None:
        """Return the string that a class body assigns to a name, own or inherited; None without one."""
        constants = (value.value for value in self._assigned(name) if isinstance(value, ast.Constant))
        return next((value for value in constants if isinstance(value, str)), None)

    def _assigned(self, name: str) -> Iterator[ast.expr]:
        """Yield the values that class bodies assign to a name, own or inherited, nearest first."""
        for definition in self.lineage():
            for node in definition.node.body:
                match node:
                    case ast.Assign([ast.Name(assigned)], value) if assigned == name:
                        yield value

    def renamed(self) -> dict[str, str]:
        """Return the config's names of fields by their usual names, from its `attribute_map`."""
        names = self.dict_of("attribute_map")
        return _strings(names.keys, names.values)


class SourceFile:
    """A parsed module of Transformers."""

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def text(self) -> str:
        """Return the source of the file."""
        return self.path.read_text(encoding="utf-8")

    @cached_property
    def _tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def _classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self._tree.body if isinstance(node, ast.ClassDef)}

    @cached_property
    def _imported(self) -> dict[str, Path]:
        """Return the file behind each imported name, for imports from files beside this one or above it."""
        files: dict[str, Path] = {}
        for node in self._tree.body:
            if isinstance(node, ast.ImportFrom) and node.level and node.module:
                path = self.path.parents[node.level - 1].joinpath(*node.module.split(".")).with_suffix(".py")
                files |= {alias.asname or alias.name: path for alias in node.names}
        return files

    def find(self, name: str) -> Definition | None:
        """Return a class that this file defines or imports from another; None without one."""
        if name in self._classes:
            return Definition(self._classes[name], self)
        if (path := self._imported.get(name)) is not None and path.is_file():
            return source_file(path).find(name)
        return None

    def classes_with(self, config: str) -> list[str]:
        """Return the names of the classes in this file whose annotations name a config."""
        return [name for name, node in self._classes.items() if config in _annotations(node)]

    def function(self, name: str) -> ast.FunctionDef | None:
        """Return a function of this file; None without one."""
        return next(
            (node for node in self._tree.body if isinstance(node, ast.FunctionDef) and node.name == name), None
        )

    def classes_in(self, variable: str) -> list[str]:
        """Return the names of the classes in a table of this file, as `LAYERS = {"attention": AttentionLayer}`."""
        for node in self._tree.body:
            match node:
                case ast.Assign([ast.Name(name)], ast.Dict(_, values)) if name == variable:
                    return [value.id for value in values if isinstance(value, ast.Name)]
        return []

    def pairs(self, variable: str) -> dict[str, str]:
        """Return all `("key", "value")` and `"key": "value"` of a table, wherever it is made or extended."""
        pairs: dict[str, str] = {}
        lines = self.text.splitlines()
        for node in self._tree.body:
            if not re.match(rf"{variable}( = |\.update\()", lines[node.lineno - 1]):
                continue
            for child in ast.walk(node):
                if isinstance(child, ast.Tuple) and len(child.elts) == 2:
                    pairs |= _strings([child.elts[0]], [child.elts[1]])
                elif isinstance(child, ast.Dict):
                    pairs |= _strings(child.keys, child.values)
        return pairs


class FunctionSource(NamedTuple):
    """A function of Transformers that was read.

    name: its name in `CutFrom.functions`.
    node: its definition.
    layers: attribute of the layers, if only the loop over them was read; "" for the whole function.
    """

    name: str
    node: ast.FunctionDef
    layers: str = ""

    @classmethod
    def of(
        cls, node: ast.FunctionDef, file: SourceFile, owner: Definition | None, layers: str = ""
    ) -> "FunctionSource":
        """Return the source of a function in a file, or of an own or inherited method of a class."""
        module = ".".join(file.path.relative_to(package() / "models").with_suffix("").parts)
        path = node.name if owner is None else f"{owner.name}.{node.name}"
        return cls(":".join([module, path, *([layers] if layers else [])]), node, layers)

    @classmethod
    def named(cls, name: str) -> "FunctionSource | None":
        """Return the source of such a name in the installed Transformers; None without one."""
        match = re.fullmatch(r"([\w.]+):(?:(\w+)\.)?(\w+)(?::(\w+))?", name)
        path = (package() / "models").joinpath(*match[1].split(".")).with_suffix(".py") if match else None
        if match is None or path is None or not path.is_file():
            return None
        file = source_file(path)
        owner = file.find(match[2]) if match[2] else None
        node = file.function(match[3]) if match[2] is None else owner and (owner.method(match[3]) or (None,))[0]
        return cls(name, node, match[4] or "") if node else None


@cache
def source_file(path: Path) -> SourceFile:
    """Return a file of Transformers; each is parsed once."""
    return SourceFile(path)


@cache
def table(variable: str) -> dict[str, str]:
    """Return one of the tables by model type behind the Auto classes."""
    auto = package() / "models" / "auto"
    files = [auto / f"{name}.py" for name in ("auto_mappings", "configuration_auto", "modeling_auto")]
    return {key: value for file in files if file.is_file() for key, value in source_file(file).pairs(variable).items()}


def _annotations(node: ast.ClassDef) -> list[str]:
    """Return the annotations of `config` in a class body and in its `__init__`."""
    annotations = []
    for child in node.body:
        match child:
            case ast.AnnAssign(ast.Name("config"), annotation):
                annotations.append(ast.unparse(annotation))
            case ast.FunctionDef("__init__", ast.arguments(args=[_, ast.arg("config", annotation), *_])) if annotation:
                annotations.append(ast.unparse(annotation))
    return annotations


def _strings(keys: list[ast.expr | None], values: list[ast.expr]) -> dict[str, str]:
    """Return the pairs of two strings; a tuple of class names counts as its first."""
    pairs = {}
    for key, value in zip(keys, values, strict=True):
        if isinstance(value, ast.Tuple) and value.elts:
            value = value.elts[0]
        match key, value:
            case ast.Constant(str(name)), ast.Constant(str(text)):
                pairs[name] = text
    return pairs
