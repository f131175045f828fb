"""A tiny random model of every family, with the structural switches of that family on."""

from functools import cache

import torch
import transformers
from transformers import PreTrainedModel

from .conftest import TINY
from .families import FAMILIES, FIELDS

SHARED = {**TINY, "initializer_range": 0.2}


@cache
def tiny(model_type: str, suffix: str = "ForCausalLM") -> PreTrainedModel:
    """A base model of the family, in evaluation mode; tests must not change it.

    Biases, norms and whatever else an initialization makes constant are random too.
    """
    family = FAMILIES[model_type]
    config = getattr(transformers, f"{family.name}Config")(**{**SHARED, **FIELDS[model_type]})
    torch.manual_seed(0)
    model = getattr(transformers, family.heads[suffix])(config).eval()
    with torch.no_grad():
        for parameter in [*model.parameters(), *(b for name, b in model.named_buffers() if "correction" in name)]:
            parameter.add_(0.1 * torch.randn_like(parameter))
    if model.can_generate():
        model.generation_config.eos_token_id = None
    return model
