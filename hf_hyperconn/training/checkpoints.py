"""Loading of a checkpoint into a model in memory, with the names that weights have on disk translated.

Mixtures, ViT, Llava and others are saved with other names than their modules have. Transformers' `from_pretrained`
translates them. Its Trainer, which resumes from a checkpoint or loads the best one, leaves such weights unloaded.
"""

from functools import reduce
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedModel

from ..errors import HyperConnError
from ..models.sub_layers import is_of_connection

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")


def is_saved_whole(model: nn.Module, folder: str) -> TypeGuard[PreTrainedModel]:
    """Tell whether a folder has all weights of a Transformers model on one device: no adapters, no shards."""
    return (
        isinstance(model, PreTrainedModel)
        and getattr(model, "hf_quantizer", None) is None
        and not getattr(model, "_hf_peft_config_loaded", False)
        and not any(hasattr(parameter, "device_mesh") for parameter in model.parameters())
        and any((Path(folder) / name).is_file() for name in WEIGHTS)
    )


def load_weights(model: PreTrainedModel, folder: str) -> None:
    """Give a model the weights of a checkpoint, in place.

    Raises `HyperConnError` when the checkpoint lacks weights. Weights tied to others do not count as lacking.
    """
    cls: Any = type(model)
    # the narrowest dtype that holds all weights of the base; connections are float32 in any
    dtypes = [p.dtype for name, p in model.named_parameters() if p.is_floating_point() and not is_of_connection(name)]
    loaded, report = cls.from_pretrained(folder, dtype=reduce(torch.promote_types, dtypes), output_loading_info=True)
    state = loaded.state_dict()
    state |= _tensors_in(folder, model.state_dict().keys() - state.keys())
    if missing := sorted({*report["missing_keys"], *(model.state_dict().keys() - state.keys())}):
        raise HyperConnError(
            f"the checkpoint {folder} lacks {len(missing)} weights of this {cls.__name__}: {', '.join(missing[:5])}"
            f"{', ...' if len(missing) > 5 else ''}. Resume with the model that was trained: the same base, converted "
            f"with the same fields; or from another checkpoint."
        )
    model.load_state_dict(state, strict=False)  # extra tensors, of modules removed from the model


def _tensors_in(folder: str, names: set[str]) -> dict[str, torch.Tensor]:
    """Return the tensors with these names on disk, of modules besides the modules of a model's class."""
    tensors: dict[str, torch.Tensor] = {}
    for path in Path(folder).glob("model*.safetensors") if names else ():
        with safe_open(path, "pt") as file:
            tensors |= {name: file.get_tensor(name) for name in names.intersection(file.keys())}
    return tensors
