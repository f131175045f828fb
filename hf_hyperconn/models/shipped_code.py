# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The files of code in a saved model: the files that its `auto_map` names, and their imports.

`chosen_code.py` imports all code that a config can choose. A model contains it with the rows of its own config. So the
imports alone decide, for a saved model, for the converter, and for `hf-hyperconn refresh`.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from .connection_fields import CHOICES, FIELDS

CHOOSING_FIELDS = ("connection", "hc_readout", "norm")  # fields, of which no two have a value in common
CHOOSING_MODULE = "chosen_code"  # the module that imports their code
SOURCES: dict[str, str] = {}  # of modules, as they were when they were first read

IMPORTED = re.compile(r"^\s*from\s+\.(\w+)\s+import", re.MULTILINE)  # as Transformers reads a file
ROW = re.compile(r"^from \.\w+ import (.+)\n", re.MULTILINE)


def modules_in(auto_map: Mapping[str, str]) -> set[str]:
    """Return the modules that an `auto_map` names."""
    return {reference.partition(".")[0] for reference in auto_map.values()}


def code_of(read: Callable[[str], str], modules: Iterable[str], config: Mapping | None = None) -> dict[str, str]:
    """Collect the source of modules, and of their imports beside them, by name.

    read: returns the source of a module.
    config: the fields of the config whose code it is; None for the code of every config.
    """
    sources: dict[str, str] = {}
    pending = set(modules)
    while pending:
        name = pending.pop()
        sources[name] = read(name) if config is None else source_for(config, name, read(name))
        pending |= {*IMPORTED.findall(sources[name])} - sources.keys()
    return dict(sorted(sources.items()))


def source_for(config: Mapping, module: str, source: str) -> str:
    """Return the source of a module for a model with this config: `chosen_code.py` without other rows."""
    if module != CHOOSING_MODULE:
        return source
    others = {
        value for field in CHOOSING_FIELDS for value in CHOICES[field] if value != config.get(field, FIELDS[field])
    }

    def row(line: re.Match) -> str:
        names = [name for name in line[1].split(", ") if value_of(name) not in others]
        return line[0].replace(line[1], ", ".join(names)) if names else ""

    return ROW.sub(row, source)


def value_of(name: str) -> str:
    """Return the value of a field behind an imported name, such as `make as value_readout`."""
    return name.split()[-1].removesuffix("_readout")


def source_in(package: str) -> Callable[[str], str]:
    """Return a function that reads the source of a module of a package, wherever it is.

    The first model reads it, once. So the saved code is the code that ran, also after an update of the package.
    The function raises `ImportError` or `OSError` for a source that can't be read.
    """

    def read(name: str) -> str:
        module = f"{package}.{name}"
        if module not in SOURCES:
            spec: Any = find_spec(module)
            source = spec and spec.loader.get_source(module)
            if source is None:
                raise ImportError(f"there is no source of {module}, which is saved with its models")
            SOURCES[module] = source
        return SOURCES[module]

    return read
