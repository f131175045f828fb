"""Static and dynamic connections start just those weights smaller, from scratch, that write into the streams."""

from collections.abc import Callable, Iterator
from copy import deepcopy

import pytest
import torch
from torch import nn

from hf_hyperconn import convert_model

from . import other_families
from .families import FAMILIES
from .tiny import tiny

WITH_NAMES_OF_THEIR_OWN = ["ctrl", "esm", "gemma4_text", "glm4v_vision", "gpt2", "internvl_vision", "t5", "videomae"]


def cases() -> Iterator:
    for name in dict.fromkeys([*FAMILIES, *other_families.LONG_TAIL]):
        quick = name in WITH_NAMES_OF_THEIR_OWN
        tail = name not in [*FAMILIES, *other_families.COMMON, *other_families.OF_EACH_FORM]
        marks = [] if quick else [pytest.mark.slow, pytest.mark.tail] if tail else [pytest.mark.slow]
        yield pytest.param(name, marks=marks)


def record(layer: nn.Module, calls: list) -> None:
    """Keep each branch of a layer that reads streams, and with what it is called."""
    for part in layer.parts:
        if part.reads:
            setattr(layer, part.branch, recorded(getattr(layer, part.branch), calls))


def recorded(branch: Callable, calls: list) -> Callable:
    def called(*args, **kwargs):
        calls.append((branch, args, kwargs))
        return branch(*args, **kwargs)

    return called


def added_by(calls: list) -> list[torch.Tensor]:
    """What branches add, called again as they were."""
    results = [branch(*args, **kwargs) for branch, args, kwargs in calls]
    return [result[0] if isinstance(result, tuple) else result for result in results]


def calls_of(model: nn.Module, inputs: dict[str, torch.Tensor]) -> list:
    """The calls of branches in a forward."""
    calls: list = []
    for layer in model.modules():
        if hasattr(layer, "sub_layers"):
            record(layer, calls)
    model(**inputs, **({"use_cache": False} if hasattr(model.config.get_text_config(), "use_cache") else {}))
    assert calls
    return calls


@torch.no_grad()
@pytest.mark.parametrize("name", cases())
def test_what_starts_smaller_is_what_writes(name):
    """Without biases, what a branch adds doubles with that, and with nothing more; a norm after it undoes this."""
    model = convert_model(deepcopy(tiny(name) if name in FAMILIES else other_families.tiny(name)))
    inputs = other_families.inputs_of(model)
    for key, parameter in model.named_parameters():
        if key.endswith("bias"):
            parameter.zero_()
    calls = calls_of(model, inputs)
    writing = [
        getattr(module, module.hc_output_projection)
        for module in model.modules()
        if hasattr(module, "hc_output_projection")
    ]
    before = added_by(calls)
    torch._foreach_mul_(writing, 2)
    doubled = added_by(calls)
    torch._foreach_zero_(writing)
    for (branch, *_), first, second, none in zip(calls, before, doubled, added_by(calls), strict=True):
        assert not none.any(), branch.__qualname__
        expected = 2 * first if differ(first, second) else first
        assert not differ(second, expected), branch.__qualname__


def differ(one: torch.Tensor, other: torch.Tensor) -> bool:
    return not torch.allclose(one, other, rtol=1e-3, atol=1e-3 * one.abs().max().item())
