"""Settings of a base's modules that were changed by hand after its config built them."""

from collections.abc import Iterable
from copy import deepcopy
from enum import Enum
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves, tree_map
from transformers import PreTrainedConfig

LOST: Any = object()  # a setting that a conversion can't have
TORCH_ATTRIBUTES = frozenset(vars(nn.Module()))
# attributes about a model's own tensors and outputs, which a conversion makes anew
RENEWED_ATTRIBUTES = ("generation_config", "all_tied_weights_keys", "warnings_issued", "model_tags", "hf_device_map")
# fields of a config about the model, without an effect on its modules
MODEL_FIELDS = (
    *("model_type", "architectures", "auto_map", "transformers_version", "dtype", "torch_dtype"),
    "tie_word_embeddings",
)
SCALAR = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, slice, Enum)
FUNCTION = (FunctionType, BuiltinFunctionType, type)
ATTENTION = "_attn_implementation_internal"  # of a config


class SetByHand:
    """Compares the modules of a base with their counterparts in a conversion.

    pairs: each module of the base, and its counterpart.
    """

    def __init__(self, pairs: Iterable[tuple[nn.Module, nn.Module]]):
        self._counterparts = {id(source): target for source, target in pairs}
        self._configs: dict[tuple[int, int], PreTrainedConfig] = {}

    def settings(self, source: nn.Module) -> dict[str, Any]:
        """Return the settings of a module that its counterpart lacks, for the counterpart, or `LOST`."""
        target = self._counterparts[id(source)]
        settings: dict[str, Any] = {}
        for name, value in vars(source).items():
            if name in {*TORCH_ATTRIBUTES, *RENEWED_ATTRIBUTES} - {"training"} or not hasattr(target, name):
                continue
            of_target, is_own = getattr(target, name), name in vars(target)
            if isinstance(value, SCALAR):
                is_another = type(value) is not type(of_target) or value != of_target
                if is_another and (is_own or not name.startswith("_")):
                    settings[name] = value
            elif isinstance(value, PreTrainedConfig) and isinstance(of_target, PreTrainedConfig):
                if (config := self._config(value, of_target)) is not of_target:
                    settings[name] = config
            elif is_own and not name.startswith("_") and not self._are_same(value, of_target):
                settings[name] = tree_map(lambda leaf: leaf, value) if _is_data(value) else LOST
        return settings

    def _config(self, source: PreTrainedConfig, target: PreTrainedConfig) -> PreTrainedConfig:
        """Return the config of a counterpart, or a copy of it with the fields set by hand in the base's."""
        pair = id(source), id(target)
        if pair not in self._configs:
            of_target = vars(target)
            others = {
                name: value
                for name, value in vars(source).items()
                if name not in MODEL_FIELDS and (name == ATTENTION or not name.startswith("_"))
                if not isinstance(value, PreTrainedConfig) and of_target.get(name, LOST) != value
            }
            self._configs[pair] = target
            if others:
                self._configs[pair] = deepcopy(target)
                vars(self._configs[pair]).update(others)
        return self._configs[pair]

    def _are_same(self, value: Any, other: Any, within: tuple[int, ...] = ()) -> bool:
        """Tell whether a value equals the counterpart's; modules must be counterparts of each other.

        within: identities of the objects that contain it.
        """
        if value is other or id(value) in within:
            return True
        if isinstance(value, nn.Module):
            return self._counterparts.get(id(value)) is other
        if type(value) is not type(other) or isinstance(value, (torch.Tensor, *FUNCTION)):
            return False
        items: Any = _items(value)
        if items is None:
            return bool(value == other)
        of_other: Any = _items(other)
        return items.keys() == of_other.keys() and all(
            self._are_same(item, of_other[key], (*within, id(value))) for key, item in items.items()
        )


def _items(value: Any) -> dict | None:
    """Return the items of a value by name or place; None if it can be compared as a whole."""
    match value:
        case dict():
            return value
        case list() | tuple():
            return dict(enumerate(value))
        case partial():
            return {"func": value.func, "args": value.args, "keywords": value.keywords}
        case MethodType():
            return {"func": value.__func__, "self": value.__self__}
    return None if type(value).__eq__ is not object.__eq__ else getattr(value, "__dict__", None)


def _is_data(value: Any) -> bool:
    """Tell whether a value consists of numbers, texts, tensors and functions, which a conversion can share."""
    return all(
        isinstance(leaf, (*SCALAR, *FUNCTION, torch.Tensor, set, frozenset))
        or (isinstance(leaf, partial) and _is_data([leaf.func, leaf.args, leaf.keywords]))
        for leaf in tree_leaves(value)
    )
