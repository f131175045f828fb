# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Elementwise functions in the place of norms: DyT (arXiv 2503.10622) and Derf (arXiv 2512.10938).

    DyT     weight * tanh(alpha x)
    Derf    weight * erf(alpha x + shift) + bias

alpha and shift are learned scalars. DyT's initial alpha depends on the width, and on whether the replaced norm is
before attention. Embeddings, which are small, are multiplied by a learned scalar. It starts as the root of the width.
"""

import inspect
from typing import Any

import torch
from torch import nn

from .connection import compute_dtype
from .connection_weights import InitializedModule

# initial alpha before attention and elsewhere, by width: the DyT paper's Tables 10 and 11
ALPHAS = {1024: (1.0, 1.0), 2048: (1.0, 0.5), 4096: (0.8, 0.2), 5120: (0.6, 0.15), 8192: (0.2, 0.05)}
DERF_ALPHA = 0.5


class DynamicActivation(InitializedModule):
    """DyT or Derf over the last dimension.

    size: size of the last dimension.
    kind: "dyt" or "derf".
    alpha: initial value of alpha.
    """

    weight: nn.Parameter
    alpha: nn.Parameter
    shift: nn.Parameter
    bias: nn.Parameter

    def __init__(self, size: int, kind: str, alpha: float):
        super().__init__()
        self.size, self.kind, self.initial_alpha = size, kind, alpha
        self.register_initial_values()

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return every parameter at the start."""
        values = {"weight": torch.ones(self.size), "alpha": torch.full((1,), self.initial_alpha)}
        if self.kind == "derf":
            values |= {"shift": torch.zeros(1), "bias": torch.zeros(self.size)}
        return values

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the activation of x `[..., size]`, in its dtype, computed in float32."""
        values = x.to(compute_dtype(x.dtype))
        if self.kind == "dyt":
            return (self.weight * torch.tanh(self.alpha * values)).to(x.dtype)
        return (self.weight * torch.erf(self.alpha * values + self.shift) + self.bias).to(x.dtype)

    @property
    def variance_epsilon(self) -> float:
        """Raise `AttributeError`: there is none."""
        raise AttributeError("variance_epsilon")

    @variance_epsilon.setter
    def variance_epsilon(self, value: float) -> None:
        # Liger sets it where it puts the kernel of an RMSNorm in the place of any norm's forward
        raise ValueError(f"{self.kind} is no RMSNorm, whose kernel would replace it. Give rms_norm=False.")

    def extra_repr(self) -> str:
        return f"{self.size}, kind={self.kind}"


class EmbeddingScale(InitializedModule):
    """Embeddings times a learned scalar, the root of the hidden size at the start (DyT paper, Appendix A)."""

    weight: nn.Parameter

    def __init__(self, hidden_size: int):
        super().__init__()
        self.hidden_size = hidden_size
        self.register_initial_values()

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Return the scalar at the start."""
        return {"weight": torch.full((1,), self.hidden_size**0.5)}

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Return embeddings `[B, S, D]` scaled, in their dtype."""
        return (hidden_states * self.weight).to(hidden_states.dtype)


def dynamic_activations(module: Any, config) -> None:
    """Replace every norm inside `module` by the activation of `config.norm`; a first layer scales embeddings, too.

    Raises `ValueError` for a norm of several tensors, or of unknown width.
    """
    family = type(config).__name__.removeprefix("HC").removesuffix("Config")  # as RobertaPreLayerNorm
    for path, norm in list(module.named_modules()):
        if "Norm" in type(norm).__name__.replace(family, ""):
            owner, _, name = path.rpartition(".")
            if (width := _width(norm)) is None or len(inspect.signature(norm.forward).parameters) > 1:
                raise ValueError(
                    f"norm is {config.norm!r}, which can't stand for the {type(norm).__name__} of "
                    f"{type(module).__name__}.{path}: it takes more than one tensor, or has no weight that tells its "
                    f"width. Leave norm at None."
                )
            attention = name == "input_layernorm" or "self_attn" in owner
            alpha = initial_alphas(config)[0 if attention else 1]
            setattr(module.get_submodule(owner), name, DynamicActivation(width, config.norm, alpha))
    if getattr(module, "is_first", False):
        module.embedding_scale = EmbeddingScale(config.hidden_size)


def initial_alphas(config) -> tuple[float, float]:
    """Return the initial alpha before and inside attention, and elsewhere: the config's, or the nearest width's."""
    nearest = min(ALPHAS, key=lambda width: abs(width - config.hidden_size))
    attention, other = ALPHAS[nearest] if config.norm == "dyt" else (DERF_ALPHA, DERF_ALPHA)
    if config.norm_alpha_attention is not None:
        attention = config.norm_alpha_attention
    return attention, other if config.norm_alpha_other is None else config.norm_alpha_other


def _width(norm: nn.Module) -> int | None:
    weight = getattr(norm, "weight", None)
    return getattr(norm, "normalized_shape", (None,))[-1] if weight is None else weight.shape[-1]
