"""Registration of the hyper-connection models with the Auto classes of Transformers."""

from collections.abc import Hashable
from typing import Any

import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from .errors import UnsupportedCheckpointError
from .families.family import Family, find_family
from .families.modules import PACKAGE
from .families.reading.classes import MAPPINGS, auto_class
from .models.transformers_seam import convenience


@convenience("Auto classes may not find models with hyper-connections; use their own, such as HCLlamaForCausalLM")
def register_auto_classes() -> None:
    """Let the Auto classes make a family's classes when they are first looked up. Safe to repeat."""
    autos = {suffix: auto for suffix in MAPPINGS if (auto := _auto(suffix)) is not None}
    tables = {"Config": CONFIG_MAPPING, **{suffix: auto._model_mapping for suffix, auto in autos.items()}}
    contents = {suffix: dict(table._extra_content) for suffix, table in tables.items()}
    for suffix, table in tables.items():
        if not isinstance(table._extra_content, _ClassesOnDemand):
            table._extra_content = _ClassesOnDemand(contents[suffix], suffix)


def register(family: Family) -> None:
    """Make one family's classes and register them. Safe to repeat."""
    configuration, modeling = family.configuration_module(), family.modeling_module()
    config_class = getattr(configuration, f"HC{family.name}Config")
    transformers.AutoConfig.register(family.hc_model_type, config_class, exist_ok=True)
    for suffix, base in family.heads.items():
        _auto(suffix).register(config_class, getattr(modeling, f"HC{base}"), exist_ok=True)


def _auto(suffix: str) -> Any:
    """Return an Auto class; None if the installed Transformers has none of that name."""
    return getattr(transformers, auto_class(suffix), None)


def _find(key: Hashable) -> Family | None:
    """Return the family of a hyper-connection model type, or of a config class of this package."""
    model_type = key if isinstance(key, str) else getattr(key, "model_type", None)
    if not isinstance(model_type, str) or not model_type.startswith("hc_"):
        return None
    if isinstance(key, type) and key.__module__.rpartition(".")[0] != PACKAGE:
        return None
    try:
        return find_family(model_type.removeprefix("hc_"))
    except UnsupportedCheckpointError:
        return None


class _ClassesOnDemand(dict):
    """The classes registered with an Auto class, by model type or config class; ours are added when looked up.

    suffix: suffix of the Auto class; "Config" for AutoConfig.
    """

    def __init__(self, content: dict, suffix: str):
        super().__init__(content)
        self._suffix = suffix

    def __contains__(self, key) -> bool:
        return super().__contains__(key) or self._family(key) is not None

    def __missing__(self, key):
        if (family := self._family(key)) is None:
            raise KeyError(key)
        register(family)
        return super().__getitem__(key)

    def _family(self, key) -> Family | None:
        family = _find(key)
        return family if family and self._suffix in ("Config", *family.heads) else None
