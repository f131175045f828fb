"""What connections cost, against the paper's tables, PyTorch's counter of operations and what autograd keeps."""

import copy
import json
import re
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import LlamaForCausalLM

from hf_hyperconn import HCOlmoeForCausalLM, HCOlmoForCausalLM
from hf_hyperconn.analysis.costs import base_flops, connection_flops, experts_of_a_token, kept_bytes, number_of_experts
from hf_hyperconn.conversion.checkpoint.checkpoint_files import read_weights
from hf_hyperconn.conversion.checkpoint.source import LocalSource
from hf_hyperconn.families.family import find_family
from hf_hyperconn.kinds.kind import NORM

from . import other_families
from .conftest import hc_llama, kept_for_a_token, llama_config
from .families import FAMILIES
from .test_parameter_counts import OLMO_1B, OLMO_7B, OLMOE
from .tiny import tiny
from .tolerances import BASE_FLOPS_OF_TABLE_8, MEASURED_MEMORY, PRINTED_MEMORY

BENCHMARKS = Path(__file__).parents[1] / "benchmarks" / "results"
PRODUCTS_OF_MATRICES = (torch.ops.aten.mm, torch.ops.aten.addmm)
NOT_BY_MATRIX = {
    "llama4_text": "its experts all run, as a product of batches",
    "inkling_text": "a matrix of its attention is met by each head",
    "recurrent_gemma": "the matrices of its gates are those of blocks, a product of batches",
}
CONFIG = {"hidden_size": 24, "num_hidden_layers": 3, "hc_mult": 4, "hc_readout": "mean"}


def shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in model.named_parameters()}


def made(config, n: int, connection: str) -> tuple[dict, dict]:
    """A hyper-connection config and the shapes of its model's weights."""
    model_class = HCOlmoeForCausalLM if config.model_type == "olmoe" else HCOlmoForCausalLM
    converted = model_class.config_class.from_prenorm(config, hc_mult=n, connection=connection)
    with torch.device("meta"):
        return converted.to_dict(), shapes(model_class(converted))


@pytest.mark.parametrize(
    ("n", "hc", "our_share", "printed_base", "printed_total", "printed_share"),
    [(2, "0.0010", "0.042", "2.3536", "2.3545", "0.038"), (4, "0.0031", "0.131", "2.3536", "2.3566", "0.127")],
)
def test_table_8_static(n, hc, our_share, printed_base, printed_total, printed_share):
    """The residual additions, in the base's figure, are taken off where connections stand for them."""
    config, weights = made(OLMO_1B, n, "shc")
    base, ours = base_flops(config, weights), connection_flops(config)
    additions = 2 * config["num_hidden_layers"] * config["hidden_size"]
    assert f"{(ours - additions) / 1e9:.4f}" == hc
    assert f"{(base + additions) / 1e9:.4f}" == printed_base
    assert f"{(base + ours - additions) / 1e9:.4f}" == printed_total
    assert f"{100 * (ours - additions) / base:.3f}" == our_share
    assert share(printed_base, printed_total) == printed_share


@pytest.mark.parametrize(
    ("config", "n", "ours", "our_share", "printed", "our_base", "printed_base", "printed_total", "printed_share"),
    [
        (OLMO_1B, 2, "0.0026", "0.112", "0.0020", "2.3535", "2.3536", "2.3554", "0.076"),
        (OLMO_1B, 4, "0.0073", "0.312", "0.0049", "2.3535", "2.3536", "2.3583", "0.200"),
        (OLMO_7B, 4, "0.0294", "0.220", "0.0197", "13.3641", "13.3647", "13.3844", "0.147"),
        (OLMOE, 4, "0.0073", "0.312", "0.0049", "2.3577", "2.3580", "2.3629", "0.208"),
    ],
)
def test_table_8_dynamic(config, n, ours, our_share, printed, our_base, printed_base, printed_total, printed_share):
    """What is printed is what predicting from one of the n streams would take, less the addition replaced."""
    config, weights = made(config, n, "dhc")
    base, flops = base_flops(config, weights), connection_flops(config)
    assert f"{flops / 1e9:.4f}" == ours
    assert f"{100 * flops / base:.3f}" == our_share
    left_out = (2 * (n - 1) * (n + 2) + 1) * config["hidden_size"]
    assert f"{(flops - 2 * config['num_hidden_layers'] * left_out) / 1e9:.4f}" == printed
    assert f"{base / 1e9:.4f}" == our_base
    assert base == pytest.approx(1e9 * float(printed_base), **BASE_FLOPS_OF_TABLE_8)
    assert share(printed_base, printed_total) == printed_share


def share(base: str, total: str) -> str:
    """Per cent, as the table's are: from the rounded totals that it prints."""
    return f"{100 * (float(total) - float(base)) / float(base):.3f}"


@pytest.mark.parametrize("model_type", FAMILIES)
def test_base_by_the_counter_of_pytorch(model_type, ids):
    model = copy.deepcopy(tiny(model_type))
    assert base_flops(model.config.to_dict(), shapes(model)) * ids.numel() == products(model, ids)


@pytest.mark.slow
@other_families.long_tail
def test_base_of_other_families_by_the_counter_of_pytorch(model_type, ids, tmp_path):
    """In memory and on disk, where weights may have other names; convolutions, which are padded, are left out."""
    if "ForCausalLM" not in find_family(model_type).heads:
        pytest.skip("it has no language model of its own")
    if model_type in NOT_BY_MATRIX:
        pytest.skip(NOT_BY_MATRIX[model_type])
    model = copy.deepcopy(other_families.tiny(model_type))
    model.save_pretrained(tmp_path)
    stored = {name: tensor.shape for name, tensor in read_weights(LocalSource(tmp_path)).tensors.items()}
    expected = products(model, ids)
    for weights in (shapes(model), stored):
        weights = {name: shape for name, shape in weights.items() if not re.search(r"conv_?\d?d?\.weight$", name)}
        assert base_flops(model.config.to_dict(), weights) * ids.numel() == expected


def products(model: nn.Module, ids: torch.Tensor) -> int:
    """Operations of matrix products, without those that depend on the context: `bmm`, of scores and of positions."""
    with suppress(ValueError):  # some have no attention
        model.set_attn_implementation("eager")
    if hasattr(model.config, "_experts_implementation"):
        model.set_experts_implementation("eager")
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(ids)
    counted = counter.get_flop_counts()["Global"]
    return sum(count for op, count in counted.items() if op in PRODUCTS_OF_MATRICES)


def test_layers_that_the_model_does_not_run():
    """DeepSeek-V3 stores one more, for the prediction of a second token, with an embedding of its own."""
    weights = {"model.embed_tokens.weight": (96, 24), "lm_head.weight": (96, 24), "model.norm.weight": (24,)}
    weights |= {f"model.layers.{i}.mlp.up_proj.weight": (48, 24) for i in range(3)}
    more = {"model.layers.3.mlp.up_proj.weight": (48, 24), "model.layers.3.embed_tokens.weight": (96, 24)}
    assert base_flops(CONFIG, weights) == base_flops(CONFIG, weights | more) == 2 * 24 * (96 + 3 * 48)


# the matrix products of one sub-layer's equations, with what is written as an outer product
PRODUCTS = {
    "shc": lambda n, d: [((n + 1, n), (n, d)), ((n, 1), (1, d))],
    "dhc": lambda n, d: [((n + 1, n), (n, d)), ((n, 1), (1, d)), ((n, d), (d, n + 2))],
    "mhc": lambda n, d: [((n + 1, n), (n, d)), ((n, 1), (1, d)), ((1, n * d), (n * d, n * n + 2 * n))],
    "ihc": lambda n, d: [((1, n), (n, d)), ((n, 1), (1, d)), ((1, n * d), (n * d, 2 * n))],
    "frac": lambda n, d: [
        ((2 * n, n), (n, d // n)),
        ((n, 1, 1), (n, 1, d // n)),
        ((n, d // n), (d // n, 2 * n + 1)),
    ],
}
NORMED = {"shc": 0, "dhc": NORM * 4, "mhc": 3 * 4, "ihc": 3 * 4, "frac": NORM}  # operations for each channel, n = 4


def flops_of(products: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> int:
    """Operations of products of matrices with these shapes."""
    with FlopCounterMode(display=False) as counter:
        for a, b in products:
            torch.matmul(torch.ones(a), torch.ones(b))
    return counter.get_total_flops()


@pytest.mark.parametrize("connection", PRODUCTS)
def test_connections_by_the_counter_of_pytorch(connection):
    """Norms, and the mean over streams, are counted by hand: they are no matrix products."""
    n, d, layers = CONFIG["hc_mult"], CONFIG["hidden_size"], CONFIG["num_hidden_layers"]
    flops = flops_of(PRODUCTS[connection](n, d))
    readout = 0 if connection == "frac" else n * d
    expected = 2 * layers * (flops + NORMED[connection] * d) + readout
    assert connection_flops({**CONFIG, "connection": connection}) == expected


def test_learned_readout_by_the_counter_of_pytorch():
    n, d = CONFIG["hc_mult"], CONFIG["hidden_size"]
    flops = flops_of([((1, n * d), (n * d, n)), ((1, n), (n, d))])
    mean, learned = ({**CONFIG, "connection": "dhc", "hc_readout": readout} for readout in ("mean", "learned"))
    added = flops + (NORM - 1) * n * d - n * d
    assert connection_flops(learned) - connection_flops(mean) == added


def test_keel_by_hand():
    """Sub-layer k adds, scales from k = 2 on and norms from k = 1 on (its paper, Section 3.1)."""
    operations = sum(1 + (k > 1) + NORM * (k > 0) for k in range(2 * CONFIG["num_hidden_layers"]))
    config = {**CONFIG, "connection": "keel", "hc_mult": 1}
    assert connection_flops(config) == operations * CONFIG["hidden_size"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("connection", "n"), [("shc", 4), ("dhc", 4), ("dhc", 3), ("frac", 4), ("frac", 2), ("keel", 1)]
)
def test_what_autograd_keeps(connection, n, dtype):
    plain = LlamaForCausalLM(llama_config()).to(dtype)
    model = hc_llama(connection=connection, hc_mult=n).to(dtype)
    added = kept_for_a_token(model) - kept_for_a_token(plain)
    assert kept_bytes(model.config.to_dict(), dtype.itemsize) == added


def test_what_a_layer_was_measured_to_keep():
    """A layer of Llama-3.2-1B with DHC×4, by the memory of the process: benchmarks/models.py."""
    measured = json.loads((BENCHMARKS / "models.json").read_text())
    assert (measured["streams"], measured["dtype"]) == (4, "float32")
    (row,) = (row for row in measured["rows"] if row["case"] == "HC")
    both = zip(row["memory"]["measured"], row["memory"]["reference"], strict=True)
    added = [(hc - plain) * 2**20 / row["tokens"] for hc, plain in both]
    config = {"connection": "dhc", "hc_mult": 4, "hidden_size": 2048}
    two, four = (kept_bytes({**config, "num_hidden_layers": layers}, 4) for layers in measured["depths"])
    assert added[1] - added[0] == pytest.approx(four - two, **MEASURED_MEMORY)


@pytest.mark.parametrize(("n", "measured"), [(2, 47.55), (4, 51.85)])
def test_table_9(n, measured):
    """OLMo-1B with SHC keeps n + 1 rows of 16 bits a connection; Appendix B adds 2n to a count of bytes, a layer."""
    kept = (measured - 41.11) * 1e9 / (16_384 * 16 * 2048)
    assert kept == pytest.approx(2 * 2 * (n + 1), **PRINTED_MEMORY)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"ffn_config": {"moe_num_experts": 16, "moe_top_k": 4}}, (4, 16)),
        ({"ffn_config": "none", "moe_top_k": 2}, (2, None)),
        ({"moe_topk": [2, 2, 2]}, (2, None)),
        ({"moe_topk": [2, 3]}, ([2, 3], None)),
        ({"moe_topk": []}, ([], None)),
    ],
    ids=str,
)
def test_experts_by_the_names_of_families(config, expected):
    """DBRX has them in a config of its MLP, HunYuan in a list with the same number for each layer."""
    assert (experts_of_a_token(config), number_of_experts(config)) == expected
