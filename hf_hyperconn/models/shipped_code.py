# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Which files of code a saved model brings: those that its `auto_map` names, and what these import.

`chosen_code.py` imports all that fields of a config can choose. A model brings it with the rows that its own config
chooses. So the imports alone decide, for whoever writes a folder: a model, the converter, or `hf-hyperconn refresh`.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from importlib.util import find_spec
from typing import Any

from .connection_fields import FIELDS

CHOOSING = ("connection", "hc_readout", "hc_start", "norm")  # fields, of which no two have a value in common
CHOSEN = "chosen_code"  # the module that imports what they choose
SOURCES: dict[str, str] = {}  # of modules, as they were when they were first asked for

IMPORTED = re.compile(r"^\s*from\s+\.(\w+)\s+import", re.MULTILINE)  # as Transformers reads a file
ROW = re.compile(r'^    "(\w+)": (\w+),\n', re.MULTILINE)
IMPORT = re.compile(r"^from \.\w+ import (.+)\n", re.MULTILINE)


def modules_in(auto_map: Mapping[str, str]) -> set[str]:
    """Return the modules that an `auto_map` names."""
    return {reference.partition(".")[0] for reference in auto_map.values()}


def code_of(read: Callable[[str], str], modules: Iterable[str], config: Mapping | None = None) -> dict[str, str]:
    """Collect the source of modules, and of those beside them that they import, by name.

    read: gives the source of a module.
    config: the fields of the config whose code it is; None for that of every config.
    """
    found: dict[str, str] = {}
    pending = set(modules)
    while pending:
        name = pending.pop()
        found[name] = read(name) if config is None else written_for(config, name, read(name))
        pending |= {*IMPORTED.findall(found[name])} - found.keys()
    return dict(sorted(found.items()))


def written_for(config: Mapping, module: str, source: str) -> str:
    """Write the source of a module as a model with this config brings it.

    Of the rows of `chosen_code.py` it keeps those that the config chooses, and imports what these name.
    """
    if module != CHOSEN:
        return source
    chosen = [config.get(name, FIELDS[name]) for name in CHOOSING]
    source = ROW.sub(lambda row: row[0] if row[1] in chosen else "", source).replace("{\n}", "{}")
    used = {function for _, function in ROW.findall(source)}

    def imported(line: re.Match) -> str:
        names = [name for name in line[1].split(", ") if name in used]
        return line[0].replace(line[1], ", ".join(names)) if names else ""

    return IMPORT.sub(imported, source)


def source_in(package: str) -> Callable[[str], str]:
    """Make what reads the source of a module of a package, wherever it is kept.

    It is read once, by the first model. So what is saved is the code that ran, also where another release has been
    installed meanwhile. What is made raises `ImportError` or `OSError` when that can't be read.
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
