"""The model of Transformers or diffusers that is given, or is within a wrapper, and its hyper-connections' fields."""

import sys

from torch import nn
from transformers import PreTrainedModel


def is_of_diffusers(model: object) -> bool:
    """Whether it is a model of diffusers, which is imported then."""
    modeling = sys.modules.get("diffusers.models.modeling_utils")
    return modeling is not None and isinstance(model, modeling.ModelMixin)


def outermost_model(model: nn.Module) -> nn.Module | None:
    """The outermost model of Transformers or diffusers in what may be a wrapper of it; None without any."""
    return next(
        (module for module in model.modules() if isinstance(module, PreTrainedModel) or is_of_diffusers(module)), None
    )


def config_of(model: nn.Module):
    """The config of a model; of one of diffusers with hyper-connections, whose own is a mapping, that of these."""
    return getattr(model, "hc_config", model.config)
