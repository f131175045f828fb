# Copyright 2026 The hf_hyperconn authors. Licensed under the Apache License, Version 2.0.
"""Hyper-Connections (arXiv 2409.19606): what stands where a residual connection stood.

Letters: B batch, S sequence, N residual streams, D hidden size; k counts sub-layers from zero (attention of decoder
layer i is k = 2i, its MLP is k = 2i + 1). A *branch* is norm + attention, or norm + MLP.

For one token, H holds its N streams as rows. A sub-layer reads, mixes and writes them with

    A = [A_m | A_r]  N x (N+1)      b  N

    width connection    branch_input = A_m^T H          what the branch reads
                        H'           = A_r^T H          the streams, mixed
    depth connection    H_next       = b (outer) branch_output + H'

`A_r[i, j]` is the weight of stream i in the new stream j. Static hyper-connections (SHC) learn A and b; dynamic ones
(DHC) add to each a small term predicted from the token's own streams (Eqs. 10-13):

    A = static_alpha + dynamic_alpha_scale * tanh(norm(H) @ dynamic_alpha_fn)
    b = static_beta  + dynamic_beta_scale  * tanh(norm(H) @ dynamic_beta_fn)

At the equivalent initialisation (Eq. 14), A = [e_{k mod N} | I] and b = 1, all streams stay equal and the model
computes what its Pre-Norm base computes, bit for bit. That is why coefficients are computed and streams are mixed in
float32, without any reduced-precision matrix product, and each stream is rounded once, when it is written.
"""

from copy import deepcopy
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from .hyper_connections_autograd import is_transformed
from .hyper_connections_step import StepCarry, Streams, step, without_autocast
from .hyper_connections_torch import compute_dtype, products_on
from .hyper_connections_types import CoefficientParameters, of_every_token, without_overflow
from .norm_forms import NormForm, form_of
from .split_parameters import whole


class Written(Protocol):
    """Streams on their way to a connection: what its `take` gives, or what a carry has written."""

    def written(self) -> torch.Tensor:
        """The streams, `[B, S, N, D]`."""


class Writer(Protocol):
    """What any width connection leaves for its branch's output."""

    def write(self, branch_output: torch.Tensor) -> Written:
        """The next streams, of a branch output `[B, S, D]`."""


@dataclass(eq=False)
class Carry:
    """What a width connection leaves for its branch's output: streams that are mixed, to be written to.

    mixed: H', the mixed streams, `[B, S, N, D]`, float32 (float64 for float64 streams).
    beta: b, the write weights, `[N]` or `[B, S, N]`, same dtype.
    dtype: the dtype of the streams.
    """

    mixed: torch.Tensor
    beta: torch.Tensor
    dtype: torch.dtype

    def write(self, branch_output: torch.Tensor) -> Streams:
        """The depth connection: the next streams, of a branch output `[B, S, D]`.

        They have the dtype that `streams + branch_output` would have.
        """
        dtype = torch.promote_types(self.dtype, branch_output.dtype)
        return Streams(self.added(without_overflow(branch_output.to(self.mixed.dtype), dtype)).to(dtype))

    def added(self, branch_output: torch.Tensor) -> torch.Tensor:
        """The next streams before they are rounded, `[B, S, N, D]`, of an output in their dtype. Eq. 5."""
        *tokens, _, size = self.mixed.shape
        return self.mixed + self.beta.unsqueeze(-1) * of_every_token(branch_output, (*tokens, size)).unsqueeze(-2)


def expand_streams(hidden_states: torch.Tensor, hc_mult: int) -> torch.Tensor:
    """Repeat hidden states `[B, S, D]` into `hc_mult` equal streams, `[B, S, N, D]` (a view). Section 2.1."""
    return hidden_states.unsqueeze(-2).expand(*hidden_states.shape[:-1], hc_mult, hidden_states.shape[-1])


def reduce_streams(streams: torch.Tensor, readout: str = "mean") -> torch.Tensor:
    """Read hidden states `[B, S, D]` out of streams `[B, S, N, D]`, in the dtype of the streams.

    readout: "mean", which returns equal streams themselves, exactly, for every N; or "sum", the paper's, which hands
    N times the vector to the final norm.
    """
    values = streams.to(compute_dtype(streams.dtype))
    return (values.sum(-2) if readout == "sum" else stream_mean(values)).to(streams.dtype)


def stream_mean(streams: torch.Tensor) -> torch.Tensor:
    """The mean `[B, S, D]` of streams `[B, S, N, D]`; of equal streams themselves, exactly."""
    first = streams[..., 0, :]
    return first + (streams - first.unsqueeze(-2)).mean(-2)


def width_connection(streams: torch.Tensor, alpha: torch.Tensor, reads: int = 1) -> tuple[torch.Tensor, torch.Tensor]:
    """Read and mix the streams: the columns of `alpha` are those of A_m, then those of A_r. Eqs. 3 and 4.

    streams: H, `[B, S, N, D]`.
    alpha: A, `[N, reads + N]` or `[B, S, N, reads + N]`, float32 (float64 for float64 streams).
    reads: number of columns of A_m.

    Returns what is read, `[B, S, reads, D]` in the dtype of the streams, and H' `[B, S, N, D]` in that of `alpha`.
    """
    products = products_on(streams.device).mixed(alpha, streams.to(alpha.dtype))
    return products[..., :reads, :].to(streams.dtype), products[..., reads:, :]


class InitialisedModule(nn.Module):
    """A module whose `initial_values` its constructor and a model's `_init_weights` both take.

    decayed: names of those of its parameters that weight decay applies to.
    """

    decayed: tuple[str, ...] = ()

    def initial_values(self) -> dict[str, torch.Tensor]:
        """Every parameter of the module itself at the start."""
        raise NotImplementedError

    def register_initial_values(self) -> None:
        """Make a parameter of each initial value."""
        for name, value in self.initial_values().items():
            self.register_parameter(name, nn.Parameter(value))


def copied(module: nn.Module) -> nn.Module:
    """A deep copy; also of a module whose tensors are fake, of which `deepcopy` alone would copy the mode."""
    with whole(module.parameters()):
        parameters = {id(p): nn.Parameter(p.detach().clone(), p.requires_grad) for p in module.parameters()}
    return deepcopy(module, parameters | {id(buffer): buffer.clone() for buffer in module.buffers()})


def in_float32(norm: nn.Module) -> nn.Module:
    """The norm, in float32; unlike by `.float()` also where its tensors are fake, which can't be changed in place."""
    for module in norm.modules():
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dtype != torch.float32:
                module.register_parameter(name, nn.Parameter(parameter.detach().float(), parameter.requires_grad))
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                setattr(module, name, buffer.float())
    return norm


class WideModule(InitialisedModule):
    """A module whose parameters stay float32 when a model is cast to 16 bits (`.to(torch.bfloat16)`, `.half()`).

    Those made or loaded in 16 bits stay so; its forward has to cast up.
    """

    def _apply(self, fn, recurse=True):
        # what `.to`, `.half`, `.cuda` and the like do to every parameter, gradient and buffer, children's included
        def widely(tensor: torch.Tensor) -> torch.Tensor:
            result = fn(tensor)
            is_narrowed = result.is_floating_point() and result.itemsize < 4 <= tensor.itemsize
            return tensor.to(result.device, torch.float32) if is_narrowed else result

        return super()._apply(widely, recurse)


class Connection(WideModule):
    """What stands around one sub-layer: a width connection before its branch and a depth connection after it.

    hidden_size: D.
    hc_mult: N, at least 1.
    sub_layer: k.

    Parameters are float32 whatever the default dtype, and stay it; the forward casts up whatever they have become.
    """

    def __init__(self, hidden_size: int, hc_mult: int, sub_layer: int):
        super().__init__()
        self.hidden_size, self.hc_mult, self.sub_layer = hidden_size, hc_mult, sub_layer

    def expand_streams(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """The first streams, `[B, S, N, D]`, of hidden states `[B, S, D]`."""
        return expand_streams(hidden_states, self.hc_mult)

    def reduce_streams(self, streams: torch.Tensor, readout: str) -> torch.Tensor:
        """Hidden states `[B, S, D]` of streams."""
        return reduce_streams(streams, readout)

    def connect(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """From streams `[B, S, N, D]`, the branch input `[B, S, D]` in their dtype, and H' and b of `Carry`."""
        raise NotImplementedError

    def take(self, streams: torch.Tensor) -> Written:
        """Streams `[B, S, N, D]` as `forward` takes them."""
        return Streams(streams)

    def forward(self, streams: Any) -> tuple[torch.Tensor, Writer]:
        """The width connection; a forward, so that hooks and wrappers of the module see it.

        streams: what `take` gives, or what the carry of the sub-layer before has written.

        Returns the branch input `[B, S, D]` and the carry, whose `write` takes the branch's output.
        """
        values = streams.written()
        with without_autocast(values):
            branch_input, mixed, beta = self.connect(values)
        return branch_input, self.carry(mixed, beta, values.dtype)

    def carry(self, mixed: torch.Tensor, beta: torch.Tensor, dtype: torch.dtype) -> Carry:
        """What writes a branch's output to H', with b, as streams of a dtype."""
        return Carry(mixed, beta, dtype)

    def width_connection(self, streams: torch.Tensor) -> tuple[torch.Tensor, Writer]:
        """`forward`, of streams `[B, S, N, D]` as a tensor."""
        return self(self.take(streams))

    def extra_repr(self) -> str:
        return f"hidden_size={self.hidden_size}, hc_mult={self.hc_mult}, sub_layer={self.sub_layer}"


class WeightedReadout(WideModule):
    """The last streams, summed with learned weights.

    weights: one for each stream, at the start.
    """

    static_gamma: nn.Parameter

    def __init__(self, weights: tuple[float, ...]):
        super().__init__()
        self.weights = weights
        self.register_initial_values()

    def initial_values(self) -> dict[str, torch.Tensor]:
        """The weights at the start, float32."""
        return {"static_gamma": torch.tensor(self.weights, dtype=torch.float32)}

    def forward(self, streams: torch.Tensor) -> torch.Tensor:
        """Hidden states `[B, S, D]` of streams `[B, S, N, D]`, in their dtype.

        Equal streams whose weights sum to 1 return themselves, exactly, and so does a stream of weight 1 beside those
        of weight 0.
        """
        with without_autocast(streams):
            values = streams.to(compute_dtype(streams.dtype))
            weights, first = self.static_gamma.to(values.dtype), values[..., 0, :]
            others: Any = sum(weights[i] * (values[..., i, :] - first) for i in range(1, len(weights)))
            return (weights.sum() * first + others).to(streams.dtype)

    def extra_repr(self) -> str:
        return f"hc_mult={len(self.weights)}"


class HyperConnection(Connection):
    """The hyper-connection around one sub-layer, static or dynamic.

    hidden_size, hc_mult, sub_layer: see `Connection`.
    norm: for DHC, a module that norms the last dimension of `[B, S, N, D]`, here only to predict the coefficients;
        None for SHC.
    tanh: whether the predicted term goes through tanh.
    written: for the history start, the streams that the branch writes to at first, where it reads stream 0; None for
        the paper's start, where it reads stream k mod N and writes to all.
    """

    decayed: tuple[str, ...] = ("dynamic_alpha_fn", "dynamic_beta_fn")
    static_alpha: nn.Parameter
    static_beta: nn.Parameter
    dynamic_alpha_fn: nn.Parameter
    dynamic_beta_fn: nn.Parameter
    dynamic_alpha_scale: nn.Parameter
    dynamic_beta_scale: nn.Parameter

    def __init__(
        self,
        hidden_size: int,
        hc_mult: int,
        sub_layer: int,
        norm: nn.Module | None = None,
        tanh: bool = True,
        written: tuple[int, ...] | None = None,
    ):
        super().__init__(hidden_size, hc_mult, sub_layer)
        self.tanh, self.written = tanh, written
        self.norm_form: NormForm | None
        self.norm = norm if norm is None else in_float32(norm)
        self.register_initial_values()

    def __setattr__(self, name: str, value) -> None:
        super().__setattr__(name, value)
        if name == "norm":
            self.norm_form = None if value is None else form_of(value, self.stream_size)

    def initial_values(self) -> dict[str, torch.Tensor]:
        """The equivalent initialisation of every parameter but the norm's, float32 (Eq. 14, Algorithm 2)."""
        alpha = self.initial_alpha()
        rows, columns = alpha.shape
        beta = torch.ones(rows, dtype=torch.float32)
        if self.written is not None:
            beta = torch.tensor([float(i in self.written) for i in range(rows)], dtype=torch.float32)
        values = {"static_alpha": alpha, "static_beta": beta}
        if self.norm is not None:
            values["dynamic_alpha_fn"] = torch.zeros(self.stream_size, columns, dtype=torch.float32)
            values["dynamic_beta_fn"] = torch.zeros(self.stream_size, dtype=torch.float32)
            values["dynamic_alpha_scale"] = torch.full((1,), 0.01, dtype=torch.float32)
            values["dynamic_beta_scale"] = torch.full((1,), 0.01, dtype=torch.float32)
        return values

    @property
    def stream_size(self) -> int:
        """Width of one stream."""
        return self.hidden_size

    def initial_alpha(self) -> torch.Tensor:
        """A at the start: read one stream, mix nothing."""
        identity = torch.eye(self.hc_mult, dtype=torch.float32)
        read = self.sub_layer % self.hc_mult if self.written is None else 0
        return torch.cat([identity[:, read : read + 1], identity], dim=1)

    def coefficients(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A and b, float32, for streams `[B, S, N, D]`: `[N, N+1]` and `[N]`; for DHC with `[B, S]` before them."""
        dtype = compute_dtype(streams.dtype)
        alpha = self.static_alpha.to(dtype)
        beta = self.static_beta.to(dtype, copy=True)  # it outlives this forward, after which FSDP frees parameters
        if self.norm is None:
            return alpha, beta
        normed = self.norm(streams.to(dtype)).to(dtype)
        predicted_alpha = normed @ self.dynamic_alpha_fn.to(dtype)
        predicted_beta = normed @ self.dynamic_beta_fn.to(dtype)
        if self.tanh:
            predicted_alpha, predicted_beta = predicted_alpha.tanh(), predicted_beta.tanh()
        return (
            alpha + self.dynamic_alpha_scale.to(dtype) * predicted_alpha,
            beta + self.dynamic_beta_scale.to(dtype) * predicted_beta,
        )

    def connect(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        alpha, beta = self.coefficients(streams)
        read, mixed = width_connection(streams, alpha)
        return read.squeeze(-2), mixed, beta

    def matrices(self, streams: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """A, reads before mixes, and b of each token, for streams `[B, S, N, D]`, in float32.

        Returns `[B, S, N, reads + N]` and `[B, S, N]`. Static ones are the same for all tokens.
        """
        alpha, beta = self.coefficients(streams)
        tokens = streams.shape[:-2]
        return alpha.expand(*tokens, *alpha.shape[-2:]), beta.expand(*tokens, *beta.shape[-1:])

    def coefficient_parameters(self, dtype: torch.dtype) -> CoefficientParameters | None:
        """What a step needs to compute `coefficients` in `dtype`; None when the norm must be called to be computed.

        That is a norm which a step does not know, or whose weight is elsewhere and only brought by its own hooks.
        """
        static = (self.static_alpha.to(dtype), self.static_beta.to(dtype))
        if self.norm is None:
            return CoefficientParameters(*static)
        norm = None if self.norm_form is None else self.norm_form.fold(self.norm)
        if norm is None or (norm.weight is not None and norm.weight.device != self.static_alpha.device):
            return None
        fn = torch.cat([self.dynamic_alpha_fn.transpose(0, 1), self.dynamic_beta_fn.unsqueeze(0)]).to(dtype)
        return CoefficientParameters(
            *static,
            fn=fn if norm.weight is None else fn * norm.weight.to(dtype),
            offset=None if norm.bias is None else (fn * norm.bias.to(dtype)).sum(-1),
            alpha_scale=self.dynamic_alpha_scale.to(dtype),
            beta_scale=self.dynamic_beta_scale.to(dtype),
            eps=norm.eps,
            centred=norm.centred,
            tanh=self.tanh,
        )

    def forward(self, streams: Streams) -> tuple[torch.Tensor, Writer]:
        if not is_transformed():
            with without_autocast(streams.values):
                parameters = self.coefficient_parameters(compute_dtype(streams.values.dtype))
                if parameters is not None:
                    written, branch_input, coefficients = step(streams, parameters)
                    return branch_input, StepCarry(written, coefficients)
        return super().forward(streams)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, tanh={self.tanh}"
