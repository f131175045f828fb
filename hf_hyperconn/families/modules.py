"""A family's two files as modules of `hf_hyperconn.models`, made when they are imported.

Llama's exist as files; `family_files.py` writes the text of the others.
"""

import sys
from importlib.abc import ExecutionLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_loader
from pathlib import Path
from typing import Any

from ..errors import UnsupportedCheckpointError
from .family_files import configuration_text, modeling_text, stem
from .reading.classes import SEPARATOR
from .reading.read_family import read_family
from .reading.source_files import table

MODELS = Path(__file__).parents[1] / "models"
PACKAGE = f"{__package__.rpartition('.')[0]}.models"
WRITERS = {"configuration_hc_": configuration_text, "modeling_hc_": modeling_text}


def code_text(file: str) -> str:
    """Return the text of a file that is shipped with a model, whether it exists or is written.

    Raises `FileNotFoundError` for another name, and `UnsupportedCheckpointError` when no family of that name can have
    hyper-connections.
    """
    path = MODELS / file
    if path.is_file():
        return path.read_text(encoding="utf-8")
    for prefix, write in WRITERS.items():
        if file.startswith(prefix) and (model_type := _model_type(file.removesuffix(".py"))) is not None:
            return write(read_family(model_type))
    raise FileNotFoundError(f"{file} is not shipped with a model.")


def install() -> None:
    """Let `import` find the modules of every family. Safe to repeat."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.append(_Finder())


def _model_type(module: str) -> str | None:
    """Return the name of a family by its module's name, where `_` also stands for `-`."""
    own, *rest = module.partition("_hc_")[2].split(SEPARATOR)
    model_types = {stem(model_type): model_type for model_type in reversed(table("CONFIG_MAPPING_NAMES"))}
    known = model_types.get(f"hc_{own}")
    return known and SEPARATOR.join([known, *(model_types.get(f"hc_{name}", name) for name in rest)])


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path=None, target=None) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        if package != PACKAGE or not name.startswith(tuple(WRITERS)) or (model_type := _model_type(name)) is None:
            return None
        try:
            read_family(model_type)
        except UnsupportedCheckpointError:
            return None
        spec: Any = spec_from_loader(fullname, _Loader(), origin=str(MODELS / f"{name}.py"))
        spec.has_location = True  # tracebacks, `inspect` and torch.compile name it, as any module's file
        return spec


class _Loader(ExecutionLoader):
    def get_source(self, fullname: str) -> str:
        return code_text(f"{fullname.rpartition('.')[2]}.py")

    def get_filename(self, fullname: str) -> str:
        return str(MODELS / f"{fullname.rpartition('.')[2]}.py")

    def is_package(self, fullname: str) -> bool:
        return False
