"""Hyper-Connections (arXiv 2409.19606) for Hugging Face Transformers.

Importing this package registers its models with AutoConfig and the AutoModel classes.
"""

import sys
from importlib import import_module
from pathlib import Path

from ._version import __version__
from .families.family import LISTED_FAMILIES, family_of_class, hc_class_names
from .families.modules import install

_EXPORTS = {
    "HyperConnection": "models.hyper_connections",
    "HyperConnectionConfig": "models.configuration_hyper_connections",
    "HCMonitorCallback": "training.monitor",
    "HCTrainer": "training.trainer",
    "HCTrainerMixin": "training.trainer",
    "convert_model": "in_memory.convert_model",
    "freeze_base": "training.parameter_groups",
    "freeze_hc": "training.parameter_groups",
    "hc_param_groups": "training.parameter_groups",
    "hc_parameters": "training.hc_file",
    "load_hc": "training.hc_file",
    "pipeline_stages": "training.pipeline",
    "register_auto_classes": "registration",
    "save_hc": "training.hc_file",
    "set_hc_implementation": "models.computing",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str):
    if name in _EXPORTS:
        return getattr(import_module(f".{_EXPORTS[name]}", __name__), name)
    if (family := family_of_class(name)) is not None:
        module = family.configuration_module() if name.endswith("Config") else family.modeling_module()
        return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the names of all exports and of the usual families' classes; other families have classes, too."""
    return sorted({*__all__, *(name for model_type in LISTED_FAMILIES for name in hc_class_names(model_type))})


install()

# the command line registers when it loads a model, so that `hf-hyperconn --help` need not import torch
if Path(*sys.argv[:1]).stem != "hf-hyperconn":
    import_module(".registration", __name__).register_auto_classes()
