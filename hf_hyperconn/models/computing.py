# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""The computation of connections: its implementation, its sums, and its operators for torch's own tools.

The fused kernels of a kind run on a GPU. Elsewhere plain torch makes sums over streams as small matrix products, or
written out for a compiler. A backward of our own computes gradients from values that the forward saved. Where the
gradients need a graph, autograd computes them anew, through the algebra written out and from the inputs alone.
"""

import inspect
import math
import os
import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, reduce
from importlib.util import find_spec
from operator import add
from typing import Any, NamedTuple

import torch
from torch.autograd import forward_ad
from transformers.utils import logging

try:  # torch's own; of this thread, where `is_in_torch_dispatch_mode` is one flag of the process
    from torch._C import _len_torch_dispatch_stack
    from torch._ops import _len_torch_dispatch_stack_pre_dispatch
except ImportError:  # operators are right everywhere

    def _len_torch_dispatch_stack() -> int:
        return 1


logger = logging.get_logger(__name__)

IMPLEMENTATIONS = ("auto", "torch", "triton")
MAX_TRITON_STREAMS = 8
_TRITON_IS_INSTALLED = find_spec("triton") is not None
_TRITON_INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1"
_setting = "auto"
_logged: set[str] = set()
_TRIES = 3  # of a kernel that fails, before it counts as one that never runs
# of kernels that were tried, by the device and the function that ran one; empty for kernels that ran
_failures: dict[tuple[torch.device, Callable], list[str]] = {}
EXACT_AT_HIGHEST = ("cpu", "cuda", "xpu", "mps", "meta")  # whose float32 matrix products then are; a TPU's are not
# none of these is public; without them a transform meets the functions of our own, and says that it can't pass
_interpreters = getattr(getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None)
_has_dispatch_key = getattr(torch._C, "_dispatch_tls_is_dispatch_key_included", lambda key: False)


def set_hc_implementation(name: str) -> None:
    """Choose the implementation of hyper-connections (static, dynamic, mHC, iHC) and attention residuals.

    name: "torch"; "triton", the fused kernels, which need a GPU (or `TRITON_INTERPRET=1`) and never fall back; or
        "auto", the kernels on a GPU. It holds for this process; `HF_HYPERCONN_IMPLEMENTATION` sets it at start.

    Kernels that have failed are tried again from here on.

    Raises `ValueError` for another name, `RuntimeError` for "triton" where Triton is not installed.
    """
    global _setting
    if name not in IMPLEMENTATIONS:
        raise ValueError(
            f"the implementation must be one of {', '.join(map(repr, IMPLEMENTATIONS))} (got {name!r}). Give another "
            f"to set_hc_implementation, or in HF_HYPERCONN_IMPLEMENTATION."
        )
    if name == "triton" and not _TRITON_IS_INSTALLED:
        raise RuntimeError('implementation "triton" requires Triton, which is not installed. Run: pip install triton')
    _setting = name
    _failures.clear()


set_hc_implementation(os.environ.get("HF_HYPERCONN_IMPLEMENTATION") or "auto")


def chosen_implementation(
    streams: torch.Tensor, run_one: Callable[[torch.device], object], most_values: int | None = None
) -> str:
    """Return which implementation computes a connection on `streams`: "torch" or "triton".

    run_one: runs a small kernel of the connection on a device, to see whether kernels run there.
    most_values: that the kernels take of a token's streams, padded as in `MAX_TRITON_VALUES`; None for any number.

    Raises `RuntimeError` when "triton" is set and can't run on them.
    """
    if _setting == "torch":
        return "torch"
    on_gpu = streams.device.type == "cuda"
    has_device = on_gpu or (_setting == "triton" and _TRITON_INTERPRETS)
    obstacle = _triton_obstacle(streams, has_device, run_one, most_values)
    if _setting == "triton" and obstacle is not None:
        raise RuntimeError(f'implementation "triton" cannot run: {obstacle}. Use "auto" or "torch" there.')
    name = "triton" if obstacle is None else "torch"
    message = f"hyper-connections are computed by {name}{f', because {obstacle}' if obstacle else ''}."
    if not torch.compiler.is_compiling() and message not in _logged:
        _logged.add(message)
        log = logger.warning if on_gpu and obstacle else logger.info
        log(message)
    return name


def _triton_obstacle(
    streams: torch.Tensor, has_device: bool, run_one: Callable, most_values: int | None
) -> str | None:
    if not _TRITON_IS_INSTALLED:
        return "Triton is not installed"
    if not has_device:
        return f"the streams are on {streams.device.type}, not on a GPU"
    if streams.dtype == torch.float64:
        return "the streams are float64"
    n, size = map(int, streams.shape[-2:])  # tensors, while `torch.jit.trace` records
    if n > MAX_TRITON_STREAMS:
        return f"there are {n} streams, more than {MAX_TRITON_STREAMS}"
    padded = [1 << (length - 1).bit_length() for length in (n, size)]
    if most_values is not None and math.prod(padded) > most_values:
        return f"{n} streams of {size} values, padded to {padded[0]} x {padded[1]}, are more than {most_values}"
    return _why_kernels_fail(streams.device, run_one) if streams.device.type == "cuda" else None


@torch.compiler.assume_constant_result
def _why_kernels_fail(device: torch.device, run_one: Callable) -> str | None:
    """Return why a small kernel fails on a GPU, as where there is no C compiler or the GPU is old; None if it runs.

    A kernel that fails is tried again. While a CUDA graph is captured none can be tried.
    """
    failures = _failures.get((device, run_one))
    if failures is not None and not failures:
        return None
    may_try = not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing())
    if may_try and (failures is None or 0 < len(failures) < _TRIES):
        failure = _try_kernels(device, run_one)
        _failures[device, run_one] = failures = [] if failure is None else [*(failures or ()), failure]
    return failures[-1] if failures else None


def _try_kernels(device: torch.device, run_one: Callable) -> str | None:
    from torch.utils._python_dispatch import _disable_current_modes  # torch's own: a folder must load without it

    try:
        with _disable_current_modes(), torch.no_grad():  # an exported program would contain the trial
            run_one(device)
    except torch.OutOfMemoryError:  # which may pass
        raise
    except Exception as error:  # of a driver, a compiler, or Triton
        first_line = next(iter(str(error).splitlines()), "")
        return f"a kernel failed on {device} ({type(error).__name__}: {first_line}); set_hc_implementation tries again"
    return None


class Products(NamedTuple):
    """The sums that a step makes over streams, channels and tokens.

    mixed: from weights `[..., N, M]` and values `[..., N, D]`, weighted sums of the values, `[..., M, D]`.
    dots: from values `[..., N, D]` and others `[..., M, D]` or `[M, D]`, their products over D, `[..., N, M]`.
    add_mixed: adds to `[B, S, N, D]`, in place, sums of `fn` `[M, D]` with weights `[B, S, N, M]`.
    over_tokens: from weights `[B, S, N, M]` and values `[B, S, N, D]`, sums over all but M and D, `[M, D]`.
    """

    mixed: Callable
    dots: Callable
    add_mixed: Callable
    over_tokens: Callable


def _mixed_by_sums(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    pairs = zip(weights.unbind(-2), values.unbind(-2), strict=True)
    return reduce(add, (weight.unsqueeze(-1) * value.unsqueeze(-2) for weight, value in pairs))


def _dots_by_sums(values: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    return torch.stack([(values * other.unsqueeze(-2)).sum(-1) for other in others.unbind(-2)], dim=-1)


def _add_mixed_by_sums(onto: torch.Tensor, weights: torch.Tensor, fn: torch.Tensor) -> None:
    for weight, row in zip(weights.unbind(-1), fn.unbind(0), strict=True):
        onto.addcmul_(weight.unsqueeze(-1), row)


def _over_tokens_by_sums(weights: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    return torch.stack([(weight.unsqueeze(-1) * values).flatten(0, -2).sum(0) for weight in weights.unbind(-1)])


MATRIX_PRODUCTS = Products(
    mixed=lambda weights, values: weights.transpose(-1, -2) @ values,
    dots=lambda values, others: values @ others.transpose(-1, -2),
    add_mixed=lambda onto, weights, fn: onto.flatten(0, -2).addmm_(weights.flatten(0, -2), fn),
    over_tokens=lambda weights, values: weights.flatten(0, -2).transpose(0, 1) @ values.flatten(0, -2),
)
SUMS = Products(_mixed_by_sums, _dots_by_sums, _add_mixed_by_sums, _over_tokens_by_sums)


def products_on(device: torch.device) -> Products:
    """Return the products for sums on a device, none of which loses bits of its operands."""
    return MATRIX_PRODUCTS if uses_matrix_products(device) else SUMS


def is_exporting() -> bool:
    """Return whether `torch.export` records.

    `torch.compiler.is_exporting` is always true in Dynamo before torch 2.12.
    """
    return getattr(torch.compiler, "_is_exporting_flag", False)


def uses_matrix_products(device: torch.device) -> bool:
    """Return whether small matrix products on `device` are the faster form and keep every bit of their operands.

    A compiler fuses sums into fewer passes over the streams. Programs that read an export fuse none.
    """
    if torch.compiler.is_compiling() and not is_exporting():
        return False
    if device.type not in EXACT_AT_HIGHEST:
        return False
    try:
        return torch.get_float32_matmul_precision() == "highest"
    except RuntimeError:  # the precision was set per backend, so it may be reduced
        return False


@torch.compiler.assume_constant_result  # a compiler has guards of its own for this
def is_transformed() -> bool:
    """Return whether a transform of `torch.func`, or forward-mode differentiation, is under way."""
    return _interpreters() is not None or getattr(forward_ad, "_current_level", -1) >= 0


def needs_autograd() -> bool:
    """Return, inside a backward, whether a graph of it is recorded, or it runs for a batch of gradients at once."""
    if torch.compiler.is_compiling():
        return False
    return torch.is_grad_enabled() or is_transformed() or _has_dispatch_key("VmapMode")


def gradients(
    function: Callable[..., Sequence[torch.Tensor]],
    tensors: Sequence[torch.Tensor | None],
    grads: Sequence[torch.Tensor | None],
) -> list[torch.Tensor | None]:
    """Return the gradients of `tensors` from the gradients of the outputs of `function`; None where none is needed.

    They have a graph of their own when gradients are enabled.
    """
    records = torch.is_grad_enabled()
    with torch.enable_grad():
        # so that a gradient does not go on to tensors which others were made of
        inputs = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
        outputs = function(*inputs)
        pairs = [(y, grad.to(y.dtype)) for y, grad in zip(outputs, grads, strict=True) if y.requires_grad]
        if not pairs:
            return [None] * len(inputs)
        trained = [tensor for tensor in inputs if tensor is not None and tensor.requires_grad]
        ys, of_ys = zip(*pairs, strict=True)
        results = iter(torch.autograd.grad(ys, trained, of_ys, create_graph=records, allow_unused=True))
    return [next(results) if tensor is not None and tensor.requires_grad else None for tensor in inputs]


def operator_namespace(module: str) -> str:
    """Return the namespace that a module registers its operators in: another for every name of a module.

    A process may hold several copies of a module, each with a Hub repo and named after its folder.
    """
    escaped = re.sub("[^0-9A-Za-z]", lambda match: "__" if match[0] == "_" else f"_{ord(match[0]):x}_", module)
    return f"hc_{escaped}"


class Operator:
    """A function that compilers, tracers, dispatch modes and tensors of other classes see as an operator of torch.

    Elsewhere it is called by itself, because calling the operator costs as much as launching a kernel.

    make_results: makes the function's results, empty, from the arguments that it names.
    """

    def __init__(self, name: str, make_results: Callable, function: Callable):
        self.function = function
        self.operator = torch.library.custom_op(name, function, mutates_args=())
        signature, names = inspect.signature(function), inspect.signature(make_results).parameters

        @self.operator.register_fake
        def _(*arguments: Any) -> Any:
            values = signature.bind(*arguments).arguments
            return make_results(**{name: values[name] for name in names})

    def __call__(self, *arguments: Any) -> Any:
        return self.operator(*arguments) if _is_recorded(arguments) else self.function(*arguments)


def operator(name: str, make_results: Callable) -> Callable[[Callable], Operator]:
    """Return a decorator that makes an operator of a function."""
    return partial(Operator, name, make_results)


_PLAIN = frozenset((torch.Tensor, torch.nn.Parameter, type(None), bool, int, float))


def _is_recorded(arguments: tuple) -> bool:
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return True
    if _len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch():
        return True
    return not _PLAIN.issuperset(map(type, arguments))


def by_token(tensor: torch.Tensor | None, inner: int) -> torch.Tensor | None:
    """Return a tensor with its token dimensions as one, `inner` dimensions behind it, the last of them dense."""
    if tensor is None:
        return None
    tensor = tensor.reshape(-1, *tensor.shape[tensor.dim() - inner :])
    to_last_stream = (tensor.shape[-2] - 1) * tensor.stride(-2) if inner == 2 else 0  # 32 bits in the kernels
    return tensor if tensor.stride(-1) == 1 and to_last_stream < 2**31 else tensor.contiguous()


def token_rows(tensor: torch.Tensor | None, inner: int) -> Any:
    """Return a tensor whose tokens lie at one stride, as of `by_token`, and its strides but the last, which is 1."""
    if tensor is None:
        return None, *(0,) * inner
    if tensor.is_contiguous() and (size := tensor.shape[-1]) * tensor.shape[-2] < 2**31:
        return (tensor, size) if inner == 1 else (tensor, size * tensor.shape[-2], size)
    tensor = by_token(tensor, inner)
    return tensor, *tensor.stride()[:-1]


_NOTHING = nullcontext()


def on_device_of(tensor: torch.Tensor) -> AbstractContextManager:
    """Return a context in which the current GPU is the tensor's."""
    index = tensor.get_device()
    return _NOTHING if index < 0 or index == torch.cuda.current_device() else torch.cuda.device(index)


def refuse_shape(branch_output: torch.Tensor | None, streams: torch.Tensor) -> None:
    """Raise `ValueError` unless a kernel, which knows the shape of the streams alone, stays within a branch output."""
    expected = (*streams.shape[:-2], streams.shape[-1])
    if branch_output is not None and branch_output.shape != expected:
        raise ValueError(
            f"a branch output for streams of shape {tuple(streams.shape)} must be of shape {expected} (got "
            f"{tuple(branch_output.shape)}). Expand it."
        )
