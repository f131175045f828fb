# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The names of operators that a compiler does not look into, and where they are needed."""

import re

import torch

try:
    from torch.utils._python_dispatch import is_in_torch_dispatch_mode
except ImportError:  # torch's own: operators are right everywhere

    def is_in_torch_dispatch_mode() -> bool:
        return True


def operator_namespace(module: str) -> str:
    """What a module registers its operators under: another for every name, of whatever characters.

    A process may hold several copies of a module, each with a Hub repo and named after its folder.
    """
    escaped = re.sub("[^0-9A-Za-z]", lambda found: "__" if found[0] == "_" else f"_{ord(found[0]):x}_", module)
    return f"hc_{escaped}"


def is_recorded(tensor: torch.Tensor) -> bool:
    """Whether a compiler, a tracer, a mode or a subclass sees what is done to a tensor, and so must see an operator.

    Elsewhere the function in an operator is called by itself: calling the operator costs as much as a launch.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    return type(tensor) not in (torch.Tensor, torch.nn.Parameter) or is_in_torch_dispatch_mode()
