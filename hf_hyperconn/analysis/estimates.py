"""Estimates of the memory and time that training takes with hyper-connections, from a config.

They are for planning: formulas for one GPU, with AdamW. Buffers, fragmentation, and activations within layers of the
plain model are left out.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from ..families.family import configs_of_stacks
from ..kinds import count_sub_layers, kind_of
from .costs import connection_flops, connection_parameters, kept_bytes

ITEM_SIZES = {"float32": 4, "bfloat16": 2}
PER_PARAMETER = 4  # a weight, its gradient and AdamW's two moments, each as large as the weight
CONNECTION_ITEM = 4  # bytes: connections are float32

# an H100's: operations and bytes a second that training reaches (docs/performance.md)
FLOPS_A_SECOND = 0.45 * 989e12
BYTES_A_SECOND = 3.35e12 / 1.5
# rows of D values for a token, forward and backward: moved by a connection's kernels, for each of N + 1; and by the
# residual addition in its place, at the full bandwidth
MOVED_ROWS = {"shc": 5, "dhc": 6}
MOVED_BY_ADDITION = 6 / 1.5
MOVED_BYTES = 2  # of a value in bfloat16


@dataclass(frozen=True)
class Estimate:
    """Memory and time of training on each GPU.

    tokens: tokens of a step on one GPU.
    parameters, added_parameters: number of the base's, and of the connections'.
    flops, added_flops: operations of the forward of one token.
    state, added_state: bytes of weights, gradients and AdamW's moments, without sharding.
    kept: bytes that connections keep for the backward, without recomputation.
    layer_inputs, added_layer_inputs: bytes that gradient checkpointing keeps instead; the second is None where the
        number of values grows from layer to layer.
    time: time of a compiled step on an H100, relative to the plain model's; None for kinds without a formula.
    """

    tokens: int
    gpus: int
    parameters: int
    added_parameters: int
    flops: int
    added_flops: int
    state: int
    added_state: int
    kept: int
    layer_inputs: int
    added_layer_inputs: int | None
    time: float | None


def estimate(
    config: Mapping,
    norm: Iterable[str] = (),
    *,
    parameters: int,
    flops: int,
    tokens: int,
    gpus: int = 1,
    dtype: str = "float32",
) -> Estimate:
    """Estimate the training of a model with connections.

    config: config of the model with connections.
    norm: names of the parameters of the family's norm.
    parameters: number of the base's parameters.
    flops: operations of the base's forward for one token, see `base_flops`.
    tokens: tokens of a step on one GPU.
    gpus: number of GPUs.
    dtype: dtype of the base's weights, and of the streams.
    """
    item, layers = ITEM_SIZES[dtype], sum(stack["num_hidden_layers"] for stack in configs_of_stacks(config))
    added = connection_parameters(config, norm)
    kept = tokens * kept_bytes(config, item)
    plain = carried = 0
    grows = False
    for stack in configs_of_stacks(config):
        of_one = tokens * item * stack["hidden_size"] * stack["num_hidden_layers"]
        rows = kind_of(stack).rows_between_layers(stack)
        plain += of_one
        carried += (rows or 1) * of_one - of_one
        grows |= rows is None
    return Estimate(
        tokens=tokens,
        gpus=gpus,
        parameters=parameters,
        added_parameters=added,
        flops=flops,
        added_flops=connection_flops(config),
        state=PER_PARAMETER * item * parameters,
        added_state=PER_PARAMETER * CONNECTION_ITEM * added,
        kept=kept,
        layer_inputs=plain,
        added_layer_inputs=None if grows else carried + kept // layers,
        time=_time(config, flops),
    )


def _time(config: Mapping, flops: int) -> float | None:
    """Return the time of a step by the connections' traffic and the plain model's operations."""
    moved = 0.0
    for stack in configs_of_stacks(config):
        if stack["connection"] not in MOVED_ROWS:
            return None
        rows = MOVED_ROWS[stack["connection"]] * (stack["hc_mult"] + 1) - MOVED_BY_ADDITION
        moved += count_sub_layers(stack) * rows * stack["hidden_size"] * MOVED_BYTES
    return 1 + moved / BYTES_A_SECOND / (3 * flops / FLOPS_A_SECOND)
