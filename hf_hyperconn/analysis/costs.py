"""What hyper-connections cost, from a config and the shapes of weights: parameters, operations, memory.

N streams, D hidden size, L decoder layers, which have 2 L connections. An addition and a multiplication are two
operations (FLOPs), as in the HC paper's Table 8. Left out is what depends on the length of the context (the scores of
attention) and what is done once for a coefficient (tanh, Sinkhorn), not for each of D channels.

A `config` is a config.json, or what a config's `to_dict` returns.
"""

import re
from collections.abc import Iterable, Mapping
from math import prod

ADDED = ("attn_hc", "mlp_hc", "hc_head")
EXPERT = ".experts."  # in the names of routed experts, not of shared ones
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
NORM = 4  # operations on each value: square, sum, divide, multiply by the weight


def is_of_connection(name: str) -> bool:
    """Whether a tensor's name is that of a hyper-connection or of the learned readout."""
    return not set(ADDED).isdisjoint(name.split("."))


def number_of_experts(config: Mapping) -> int | None:
    """How many routed experts a layer has, by whichever name its family gives that; None where no name stands."""
    return next((config[name] for name in EXPERTS if name in config), None)


def connection_parameters(config: Mapping, norms: int) -> int:
    """Parameters of all connections that a base can be converted to (HC paper, Eqs. 21-26 and Table 7).

    norms: how many weights the family's norm has for each channel.
    """
    n, d = config["hc_mult"], config["hidden_size"]
    match config["connection"]:
        case "shc":
            each = n * (n + 2)
        case "dhc":
            each = n * (n + 2) + d * (n + 2 + norms) + 2
        case "frac":
            each = n * (2 * n + 1) + d // n * (2 * n + 1 + norms) + 2
        case "mhc":
            each = n * (n + 2) * (n * d + 1) + 3
        case "ihc":
            each = 2 * n * (n * d + 1) + 2
    return 2 * config["num_hidden_layers"] * each


def base_flops(config: Mapping, shapes: Mapping[str, Iterable[int]]) -> int:
    """Operations of the base's forward for one token: two for each weight of a matrix that the token meets.

    shapes: of all weights by name, of each expert apart (as on disk) or fused (as in memory).

    Of experts a token meets `num_experts_per_tok`. An embedding is looked up, unless it is the language model's head,
    too. Layers beyond the config's, for the prediction of more tokens, are not run.
    """
    is_language_model = all(name.endswith("ForCausalLM") for name in config.get("architectures") or ())
    has_tied_head = is_language_model and not any(name.endswith("lm_head.weight") for name in shapes)
    met_by_all = routed = 0
    for name, shape in shapes.items():
        layer = LAYER.search(name)
        if is_of_connection(name) or (layer and int(layer[1]) >= config["num_hidden_layers"]):
            continue
        is_looked_up = name.endswith("embed_tokens.weight") and not has_tied_head
        if is_looked_up or len(tuple(shape)) < 2 or name.endswith("bias"):
            continue
        if EXPERT in name:
            routed += prod(shape)
        else:
            met_by_all += prod(shape)
    if routed:
        met_by_all += routed * config["num_experts_per_tok"] // number_of_experts(config)
    return 2 * met_by_all


def connection_flops(config: Mapping) -> int:
    """Operations of all connections and the readout in the forward of one token, by their equations.

    To read, mix and write N streams takes 2 N (N + 2) D (HC paper, Eqs. 2-5); to predict the coefficients of DHC as
    much again, and a norm (Eqs. 10-13); those of mHC, of all streams, N times as much (mHC paper, Eq. 7). The residual
    additions that connections replace, D each, are not taken off.

    Table 8 of the HC paper has them off, and prints less for DHC: for DHC×4 in OLMo-1B 0.0049 G, not this 0.0073 G.
    That is what a prediction from one stream takes, 2 (N + 2) D, where each of the N streams has its own.
    """
    n, d, layers = config["hc_mult"], config["hidden_size"], config["num_hidden_layers"]
    moved = 2 * n * (n + 2) * d
    readout = n * d
    match config["connection"]:
        case "shc":
            each = moved
        case "dhc":
            each = moved + 2 * n * (n + 2) * d + NORM * n * d
        case "mhc":
            each = moved + 2 * n * (n + 2) * n * d + (NORM - 1) * n * d
        case "ihc":
            each = 4 * n * d + 2 * (2 * n) * n * d + (NORM - 1) * n * d
        case "frac":
            each, readout = 2 * 2 * (2 * n + 1) * d + NORM * d, 0
        case "keel":  # the first sub-layer has no norm, the first two do not scale
            return (2 * layers + (2 * layers - 2) + NORM * (2 * layers - 1)) * d
    if config.get("hc_readout") == "learned":
        readout = 2 * n * n * d + (NORM - 1) * n * d + 2 * n * d
    return 2 * layers * each + readout


def kept_bytes(config: Mapping, item_size: int) -> int:
    """Bytes for one token that the connections keep for the backward, beyond what the plain model keeps.

    item_size: bytes of one value of the streams; coefficients, and what frac-connections and Keel keep, are float32.

    The steps of SHC and DHC keep the N streams that a layer receives and the outputs of its two branches, the fused
    kernels of mHC and iHC the streams and the output of every sub-layer; the first streams are one embedding.
    Frac-connections and Keel are differentiated by autograd. Not counted are streams computed again, the readout, the
    parameters' own copies, and the mean of each stream where a LayerNorm predicts coefficients.
    """
    n, d, layers = config["hc_mult"], config["hidden_size"], config["num_hidden_layers"]
    rows, each = 0, 0
    match config["connection"]:
        case "shc":
            rows = layers * (n + 2) - (n - 1)
        case "dhc":  # coefficients, their prediction, the norm's divisors
            rows, each = layers * (n + 2) - (n - 1), n * (n + 2) + n * (n + 2) + n
        case "mhc":  # reads, writes, mixes, their prediction, the norm's divisor
            rows, each = 2 * layers * (n + 1) - (n - 1), n + n + n * n + n * (n + 2) + 1
        case "ihc":
            rows, each = 2 * layers * (n + 1) - (n - 1), n + n + 2 * n + 1
        case "frac":
            each = 5 * d + 2 * n * (2 * n + 1) + n
        case "keel":
            return 4 * (2 * layers - 1) * (2 * d + 1)
    return item_size * rows * d + 4 * 2 * layers * each
