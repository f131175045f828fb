"""The paper's Table 7, from configs alone."""

import pytest
import torch
from transformers import OlmoConfig, OlmoeConfig

from hf_hyperconn import HCOlmoeForCausalLM, HCOlmoForCausalLM
from hf_hyperconn.analysis.costs import connection_parameters

OLMO_1B = OlmoConfig(
    vocab_size=50304,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=16,
    tie_word_embeddings=True,
)
OLMO_7B = OlmoConfig(vocab_size=50304, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32)
OLMOE = OlmoeConfig(
    vocab_size=50304,
    hidden_size=2048,
    intermediate_size=1024,
    num_hidden_layers=16,
    num_attention_heads=16,
    num_experts=64,
    num_experts_per_tok=8,
)


def counts(model_class, config, n, connection) -> dict[str, int]:
    """Count the parameters of the model by kind; `residual norms` are those of the base outside attention."""
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_prenorm(config, hc_mult=n, connection=connection))
    parameters = {"base": 0, "residual norms": 0, "connections": 0, "connections' norms": 0}
    for name, parameter in model.named_parameters():
        if "_hc." in name:
            parameters["connections' norms" if ".norm." in name else "connections"] += parameter.numel()
        else:
            parameters["residual norms" if "layernorm" in name or "model.norm" in name else "base"] += (
                parameter.numel()
            )
    return parameters


@pytest.mark.parametrize(
    ("model_class", "config", "n", "connection", "base", "added", "percent", "printed"),
    [
        (HCOlmoForCausalLM, OLMO_1B, 2, "shc", "1.17676442", 256, "0.00002", "0.0000026"),
        (HCOlmoForCausalLM, OLMO_1B, 4, "shc", "1.17676442", 768, "0.00007", "0.0000077"),
        (HCOlmoForCausalLM, OLMO_1B, 2, "dhc", "1.17676442", 262_464, "0.02230", "0.0002625"),
        (HCOlmoForCausalLM, OLMO_1B, 4, "dhc", "1.17676442", 394_048, "0.03349", "0.0003940"),
        (HCOlmoForCausalLM, OLMO_7B, 4, "dhc", "6.88809574", 1_574_528, "0.02286", "0.0013124"),
        (HCOlmoeForCausalLM, OLMOE, 4, "dhc", "6.91909427", 394_048, "0.00570", "0.0003940"),
    ],
)
def test_table_7(model_class, config, n, connection, base, added, percent, printed):
    """Its billions of added parameters are misprints for SHC and the 7B; the totals and shares beside them are right.

    SHC's are printed ten times too large. Those of the 7B lack one row of D a connection.
    """
    parameters = counts(model_class, config, n, connection)
    assert f"{parameters['base'] / 1e9:.8f}" == base
    assert parameters["connections"] == added
    assert connection_parameters({**config.to_dict(), "hc_mult": n, "connection": connection}) == added
    assert f"{100 * added / parameters['base']:.5f}" == percent
    if config.model_type == "olmo":
        assert parameters["residual norms"] == parameters["connections' norms"] == 0
    times, less = 10 if connection == "shc" else 1, 4096 if config is OLMO_7B else 0
    assert f"{times * (added - less * 2 * config.num_hidden_layers) / 1e9:.7f}" == printed


def test_norms_that_table_7_leaves_out():
    """OLMoE's norms have weights, which the table counts neither in the base nor in the connections."""
    parameters = counts(HCOlmoeForCausalLM, OLMOE, 4, "dhc")
    assert parameters["residual norms"] == (2 * 16 + 1) * 2048
    assert parameters["connections"] + parameters["connections' norms"] == 394_048 + 2 * 16 * 2048 == 459_584
