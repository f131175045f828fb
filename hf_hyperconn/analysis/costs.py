"""Parameters, operations and memory that hyper-connections cost, from a config and the shapes of weights.

The costs of one connection or readout are in `kinds`.

N streams, D hidden size, L decoder layers, which have 2 L connections. An addition and a multiplication are two
operations (FLOPs), as in the HC paper's Table 8. Operations that depend on the length of the context (the scores of
attention) are left out. So are operations on coefficients (tanh, Sinkhorn) instead of D channels.

A `config` is a config.json, or the result of a config's `to_dict`.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from math import prod
from typing import Any

from ..families.family import configs_of_stacks, tower_of, usual_names
from ..families.family_source import InnerModel
from ..families.reading.classes import FamilyName
from ..kinds import kind_of, readout_of
from ..models.sub_layers import is_of_connection

# in the names of routed experts, not of shared experts or routers; the second is Granite's and JetMoE's
EXPERT = re.compile(r"\.experts\.(?!router)|(?:(?<!shared_)mlp|moe|experts)\.(?:in|out)put_linear\.weight$")
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
EXPERTS_A_TOKEN = ("num_experts_per_tok", "num_experts_per_token", "top_k_experts", "moe_topk", "moe_top_k", "moe_k")
EXPERTS_BY_RULE = {"switch_transformers": 1, "nllb-moe": 2}  # by model type, where no field says
LANGUAGE_MODELS = ("ForCausalLM", "ForConditionalGeneration", "LMHeadModel")
# names of embeddings of tokens, which may be the head, too; and of other embeddings and parameters that are no matrix
EMBEDDING = re.compile(r"(?:^|\.)(?:embed_tokens|embed_in|wte|w|shared|(?:tok_|word_)?embeddings)\.weight$")
OTHER_LOOKUP = re.compile(
    r"(?:^|\.)(?:wpe|embed_positions|pos\w*_embeddings?|token_type_embeddings|embed_tokens_per_layer"
    r"|relative_attention_bias)\.weight$|\.A_log$"
)
# in the names of modules that a text does not run through
TOWER = re.compile(r"vision|visual|image|video|audio|speech|multi_?modal_projector")
ON_DISK = re.compile(rf"{TOWER.pattern}|(?:^|\.)vit\.")  # in the names of a tower whose name is not its attribute
LANGUAGE_MODEL = re.compile(r"language_model|text_model")  # in the names of an inner language model
# as `h.0.` in GPT-2, `encoder.layer.0.` in ViT
LAYER = re.compile(r"(?:^|\.)(?:layers?|h|(?:res)?blocks?)\.([0-9]{1,9})\.")


def number_of_experts(config: Mapping) -> int | None:
    """Return the number of routed experts of a layer, by any name that families use; None without any."""
    return _of_a_layer(config, EXPERTS)


def experts_of_a_token(config: Mapping) -> int | None:
    """Return the number of routed experts for one token, by a field or its family's rule; None without either."""
    if (met := _of_a_layer(config, EXPERTS_A_TOKEN)) is not None:
        return met
    return EXPERTS_BY_RULE.get(FamilyName.of(str(config.get("model_type")).removeprefix("hc_")).own)


def _of_a_layer(config: Mapping, names: Iterable[str]):
    """Return the value of the first of these fields. HunYuan has a list, with one value for all layers.

    DBRX has the fields in a config of its MLP.
    """
    if isinstance(of_mlp := config.get("ffn_config"), Mapping):
        config = {**of_mlp, **config}
    value = next((config[name] for name in names if name in config), None)
    return value[0] if isinstance(value, list) and value and all(other == value[0] for other in value) else value


def connection_parameters(config: Mapping, norm: Iterable[str] = ()) -> int:
    """Return the parameters of all connections and the readout (HC paper, Eqs. 21-26 and Table 7).

    norm: names of the parameters of the family's norm, each of which has a value for each channel.
    """
    return sum(
        kind_of(stack).parameters(stack, norm) + sum(map(prod, readout_of(stack).shapes(stack, norm).values()))
        for stack in configs_of_stacks(config)
    )


def base_flops(config: Mapping, shapes: Mapping[str, Iterable[int]]) -> int:
    """Return the operations of the base's forward for one token: two for each weight of a matrix that the token meets.

    shapes: of all weights by name, of each expert apart (as on disk) or fused (as in memory).

    A token runs through the experts that it is routed to. An embedding is looked up, unless it is the language model's
    head, too. Layers beyond the config's, for the prediction of more tokens, are not run. The token is one of a text,
    so modules for images and sounds are not run. Where a vision tower has the connections, only the tower is run.
    """
    layers = max(stack["num_hidden_layers"] for stack in configs_of_stacks(config))
    config = usual_names(config)
    is_language_model = all(name.endswith(LANGUAGE_MODELS) for name in config.get("architectures") or ())
    embeddings = {tuple(shape) for name, shape in shapes.items() if EMBEDDING.search(name)}
    of_that_shape = [name for name, shape in shapes.items() if tuple(shape) in embeddings]
    has_tied_head = is_language_model and all(
        any(pattern.search(name) for pattern in (EMBEDDING, OTHER_LOOKUP, LAYER, TOWER)) for name in of_that_shape
    )
    runs = weights_that_run(config, shapes)
    met_by_all = routed = 0
    for name, shape in shapes.items():
        layer = LAYER.search(name)
        if is_of_connection(name) or not runs(name) or (layer and int(layer[1]) >= layers):
            continue
        is_looked_up = EMBEDDING.search(name) and not has_tied_head
        if is_looked_up or OTHER_LOOKUP.search(name) or len(tuple(shape)) < 2 or name.endswith("bias"):
            continue
        if EXPERT.search(name):
            routed += prod(shape)
        else:
            met_by_all += prod(shape)
    if routed:
        met: Any = experts_of_a_token(config)
        met_by_all += routed * met // number_of_experts(config)
    return 2 * met_by_all


def weights_that_run(config: Mapping, names: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that tells by the name of a weight whether a token runs through it.

    names: names of all weights.
    """
    if (tower := tower_of(config)) is not None:
        return weights_of_tower(tower, names)
    return lambda name: not ("text_config" in config and TOWER.search(name))


def weights_of_tower(tower: InnerModel, names: Iterable[str]) -> Callable[[str], bool]:
    """Return a function that tells by the name of a weight whether it is of a tower.

    names: names of all weights. On disk a tower may have another name than in memory.
    """
    of_attribute = re.compile(rf"(?:^|\.){tower.attribute}\.")
    pattern = of_attribute if any(map(of_attribute.search, names)) else ON_DISK
    return lambda name: pattern.search(name) is not None


def connection_flops(config: Mapping) -> int:
    """Return the operations of all connections and the readout in the forward of one token, by their equations.

    Reading, mixing and writing N streams are 2 N (N + 2) D operations (HC paper, Eqs. 2-5). Predicting DHC's
    coefficients are as many again, and a norm (Eqs. 10-13). mHC predicts from all streams at once, with N times as
    many (mHC paper, Eq. 7). The residual additions that connections replace, D each, are not subtracted.

    Table 8 of the HC paper subtracts them, and prints less for DHC: 0.0049 G for DHC×4 in OLMo-1B, here 0.0073 G. Its
    number fits a prediction from one stream, 2 (N + 2) D. By the equations each of the N streams has its own.
    """
    return sum(kind_of(stack).flops(stack) + readout_of(stack).flops(stack) for stack in configs_of_stacks(config))


def kept_bytes(config: Mapping, item_size: int) -> int:
    """Return the bytes for one token that connections keep for the backward, beyond the plain model's.

    item_size: bytes of one value of the streams. Coefficients are float32, and all values that frac-connections, Keel
        and ResiDual keep.

    The steps of SHC, DHC and AltUp keep the N streams that a layer receives and its branches' outputs. The
    kernels of mHC and iHC keep the streams and every sub-layer's output. The first streams are one embedding.
    Attention residuals keep the values that they read. Autograd differentiates frac-connections, Keel and ResiDual.

    Recomputed streams and the parameters' own copies are not counted. Of readouts only the attention residuals' is.
    Nor is the mean of each stream where a LayerNorm predicts coefficients.
    """
    kept = 0
    for stack in configs_of_stacks(config):
        rows, values = kind_of(stack).kept_for_backward(stack)
        kept += item_size * rows * stack["hidden_size"] + 4 * values
    return kept
