"""Making the Auto classes of Transformers know the hyper-connection models."""

import transformers

from .families import FAMILIES


def register_auto_classes() -> None:
    """Register every family with the Auto classes; saved models then ship their own code. Safe to repeat."""
    for family in FAMILIES.values():
        modules = {
            module.__name__.rpartition(".")[2]: module
            for module in (family.configuration_module(), family.modeling_module())
        }
        classes = {}
        for auto, reference in family.auto_map.items():
            file, _, name = reference.partition(".")
            classes[auto] = getattr(modules[file], name)
            classes[auto].register_for_auto_class(auto)
        config_class = classes.pop("AutoConfig")
        transformers.AutoConfig.register(family.hc_model_type, config_class, exist_ok=True)
        for auto, model_class in classes.items():
            getattr(transformers, auto).register(config_class, model_class, exist_ok=True)
