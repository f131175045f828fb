"""Loading faults that Transformers reports: missing tensors, unknown tensors, tensors of other shapes.

Only headers are read: the model and the tensors are made without memory behind them.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from logging import getLogger
from typing import Any

import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.utils import logging

from hf_hyperconn.analysis.costs import LAYER
from hf_hyperconn.errors import UnsupportedCheckpointError
from hf_hyperconn.models.sub_layers import is_of_connection

from ..files.reading import TensorInfo
from ..interrupts import holding_interrupts
from .checkpoint import Checkpoint
from .sizes import more_than_layers
from .source import CONFIG

RUN_AS_NAMED = ("eager", "batched_mm")  # implementations that are neither fetched nor of few devices
LARGEST_BUFFER = 2**28  # values, besides as many as the weights have
CANT_CAST = "_apply(): Couldn't swap"  # of a module whose tensors are fake
FAKE_TENSORS = getLogger("torch._subclasses.fake_tensor")  # traces every error there, also one that is caught


@dataclass(frozen=True)
class LoadingFault:
    """The reason why Transformers would not load the whole model from all of the tensors.

    kind: a tensor is "missing", "unknown" or of another "shape", the config makes too large a "buffer", or the whole
        is "refused".
    text: for people.
    """

    kind: str
    text: str

    def __str__(self) -> str:
        return self.text


class _Header:
    """A stand-in for a tensor that is not read, of the same shape and any dtype."""

    def __init__(self, shape: tuple[int, ...]):
        self._tensor = torch.empty(shape)

    def __getitem__(self, index) -> "_Header":
        return self

    def to(self, *args, **kwargs) -> torch.Tensor:
        """Return the tensor, without memory."""
        return self._tensor


def fault_by_headers(checkpoint: Checkpoint, tensors: Mapping[str, TensorInfo] | None = None) -> LoadingFault | None:
    """Find a tensor that is missing, unknown to the base's class, or of another shape.

    checkpoint: of a base, or of its conversion, whose connections are left out.
    tensors: the tensors to judge, by name; None for the checkpoint's.

    Raises `UnsupportedCheckpointError` when the config names a class that is not of the family.
    """
    config = checkpoint.raw_config
    if "quantization_config" in config:  # its tensors are packed
        return None
    model_class: Any = base_class(checkpoint)
    tensors = checkpoint.weights.tensors if tensors is None else tensors
    shapes = {name: tensor.shape for name, tensor in tensors.items() if not is_of_connection(name)}
    plain = {name: _number(value) for name, value in config.items() if name not in ("auto_map", "architectures")}
    try:
        with quiet_loading():
            model_config = model_class.config_class.from_dict({**plain, **checkpoint.family.types_of_base(plain)})
            with FakeTensorMode(allow_non_fake_inputs=True):
                model, report = model_class.from_pretrained(
                    None,
                    config=model_config,
                    state_dict={name: _Header(shape) for name, shape in shapes.items()},
                    dtype=torch.float32,
                    attn_implementation="eager",
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                )
    except Exception as error:  # whatever Transformers makes of a config that contradicts itself or the weights
        # a class that computes with numbers, or casts modules of its own, while it is made
        if isinstance(error, DataDependentOutputException) or str(error).startswith(CANT_CAST):
            more = more_than_layers(checkpoint)
            return LoadingFault("unknown", more) if more else None
        return LoadingFault("refused", refused_by_transformers(error))
    return loading_fault(report, model_class) or _fault_of_buffers(model, shapes)


def _fault_of_buffers(model: PreTrainedModel, shapes: Mapping[str, tuple[int, ...]]) -> LoadingFault | None:
    """Find a buffer that the config makes far larger than the weights."""
    weights = sum(map(math.prod, shapes.values()))
    widest = max((max(shape, default=1) for shape in shapes.values()), default=1)
    for name, buffer in model.named_buffers():
        has_too_many = name.endswith("inv_freq") and buffer.shape[-1] > widest  # which are multiplied by positions
        if has_too_many or (name not in shapes and buffer.numel() > LARGEST_BUFFER + weights):
            text = f"the config makes {name} of {buffer.numel():,} values, and the weights have {weights:,}"
            return LoadingFault("buffer", text)
    return None


def _number(value: object) -> object:
    """Read a value of config.json, where Transformers writes infinity as `{"__float__": "Infinity"}`."""
    match value:
        case list():
            return [_number(item) for item in value]
        case {"__float__": "Infinity" | "-Infinity" | "NaN" as number, **others} if not others:
            return float(number)
    return value


def base_class(checkpoint: Checkpoint) -> type[PreTrainedModel]:
    """Return the class of Transformers of a base, or of the base of a conversion.

    Raises `UnsupportedCheckpointError` when the config names another.
    """
    family = checkpoint.family
    architecture = checkpoint.architectures[0]
    name = architecture.removeprefix("HC")
    if name not in family.architectures:
        raise UnsupportedCheckpointError(
            f"{CONFIG} of {checkpoint.name!r} names the architecture {architecture!r}; known are "
            f"{', '.join(family.architectures)}."
        )
    return family.base_class(name)


def loading_fault(report: dict, model_class: type[PreTrainedModel], layers: int | None = None) -> LoadingFault | None:
    """Return the first fault in a loading report, if there is one.

    layers: how many of the first layers were loaded, where some were left out.
    """
    if missing := sorted(report["missing_keys"]):
        return LoadingFault("missing", f"the tensor {missing[0]} is missing")
    unexpected = sorted(report["unexpected_keys"])
    if layers is not None:
        unexpected = [name for name in unexpected if not ((match := LAYER.search(name)) and int(match[1]) >= layers)]
    if unexpected:
        return LoadingFault("unknown", f"a {model_class.__name__} has no tensor {unexpected[0]}")
    for name, stored, expected in sorted(report["mismatched_keys"]):
        return LoadingFault("shape", f"{name} is {list(stored)}, and its model's {list(expected)}")
    return None


def refused_by_transformers(error: Exception) -> str:
    """Say that Transformers can't load a checkpoint, and why."""
    return f"Transformers can't load it ({' '.join(str(error).split()) or type(error).__name__:.300})"


def without_kernels(config: PreTrainedConfig) -> PreTrainedConfig:
    """Change a config so that no kernel of attention or experts is fetched, or requires a device.

    Transformers chooses implementations other than `RUN_AS_NAMED`, in inner configs, too.
    """
    nested = list(_nested(config))
    for field in ("_attn_implementation", "_experts_implementation"):
        names = [getattr(part, field, None) for part in nested]
        for part, name in zip(nested, names, strict=True):  # setting it sets it in inner configs, which come after
            setattr(part, field, name if name in RUN_AS_NAMED else None)
    return config


def _nested(config: PreTrainedConfig) -> Iterator[PreTrainedConfig]:
    yield config
    for value in list(vars(config).values()):
        if isinstance(value, PreTrainedConfig):
            yield from _nested(value)


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep Transformers' loading reports and bars and torch's traces from the terminal.

    Ctrl-C is held meanwhile, because several threads load weights.
    """
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    was_disabled, FAKE_TENSORS.disabled = FAKE_TENSORS.disabled, True
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with holding_interrupts():
            yield
    finally:
        FAKE_TENSORS.disabled = was_disabled
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
