# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Operators that a compiler does not look into, and their names."""

import re
from collections.abc import Callable
from typing import Any

import torch

try:  # torch's own; of this thread, where `is_in_torch_dispatch_mode` is one flag of the process
    from torch._C import _len_torch_dispatch_stack
    from torch._ops import _len_torch_dispatch_stack_pre_dispatch
except ImportError:  # operators are right everywhere

    def _len_torch_dispatch_stack() -> int:
        return 1


def operator_namespace(module: str) -> str:
    """What a module registers its operators under: another for every name, of whatever characters.

    A process may hold several copies of a module, each with a Hub repo and named after its folder.
    """
    escaped = re.sub("[^0-9A-Za-z]", lambda found: "__" if found[0] == "_" else f"_{ord(found[0]):x}_", module)
    return f"hc_{escaped}"


class Operator:
    """A function that compilers, tracers, dispatch modes and tensors of other classes see as an operator of torch.

    Elsewhere it is called by itself: calling the operator costs as much as launching a kernel.
    """

    def __init__(self, name: str, function: Callable):
        self.function = function
        self.operator = torch.library.custom_op(name, function, mutates_args=())
        self.register_fake = self.operator.register_fake

    def __call__(self, *arguments: Any) -> Any:
        return self.operator(*arguments) if _is_recorded(arguments) else self.function(*arguments)


def operator(name: str) -> Callable[[Callable], Operator]:
    """A decorator that makes an operator of a function."""
    return lambda function: Operator(name, function)


def _is_recorded(arguments: tuple) -> bool:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    if _len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch():
        return True
    plain = torch.Tensor, torch.nn.Parameter
    return any(isinstance(each, torch.Tensor) and type(each) not in plain for each in arguments)
