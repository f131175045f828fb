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
    """Parameters of the model by kind; `residual norms` are those of the base outside attention."""
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_prenorm(config, hc_mult=n, connection=connection))
    found = {"base": 0, "residual norms": 0, "connections": 0, "connections' norms": 0}
    for name, parameter in model.named_parameters():
        if "_hc." in name:
            found["connections' norms" if ".norm." in name else "connections"] += parameter.numel()
        else:
            found["residual norms" if "layernorm" in name or "model.norm" in name else "base"] += parameter.numel()
    return found


@pytest.mark.parametrize(
    ("model_class", "config", "n", "connection", "base", "added", "percent"),
    [
        (HCOlmoForCausalLM, OLMO_1B, 2, "shc", "1.17676442", 256, "0.00002"),
        (HCOlmoForCausalLM, OLMO_1B, 4, "shc", "1.17676442", 768, "0.00007"),
        (HCOlmoForCausalLM, OLMO_1B, 2, "dhc", "1.17676442", 262_464, "0.02230"),
        (HCOlmoForCausalLM, OLMO_1B, 4, "dhc", "1.17676442", 394_048, "0.03349"),
        # the table also prints 1,312,384 here, which contradicts its own total and its own share of 0.02286 %
        (HCOlmoForCausalLM, OLMO_7B, 4, "dhc", "6.88809574", 1_574_528, "0.02286"),
        (HCOlmoeForCausalLM, OLMOE, 4, "dhc", "6.91909427", 394_048, "0.00570"),
    ],
)
def test_table_7(model_class, config, n, connection, base, added, percent):
    found = counts(model_class, config, n, connection)
    assert f"{found['base'] / 1e9:.8f}" == base
    assert found["connections"] == added
    fields = {**config.to_dict(), "hc_mult": n, "connection": connection}
    assert connection_parameters(fields) == added
    assert f"{100 * added / found['base']:.5f}" == percent
    if config.model_type == "olmo":
        assert found["residual norms"] == found["connections' norms"] == 0


def test_norms_that_table_7_leaves_out():
    """OLMoE's norms have weights, which the table counts neither in the base nor in the connections."""
    found = counts(HCOlmoeForCausalLM, OLMOE, 4, "dhc")
    assert found["residual norms"] == (2 * 16 + 1) * 2048
    assert found["connections"] + found["connections' norms"] == 394_048 + 2 * 16 * 2048 == 459_584


@pytest.mark.parametrize(
    ("config", "n", "connection", "printed", "times", "less"),
    [
        (OLMO_1B, 2, "shc", "0.0000026", 10, 0),
        (OLMO_1B, 4, "shc", "0.0000077", 10, 0),
        (OLMO_1B, 2, "dhc", "0.0002625", 1, 0),
        (OLMO_1B, 4, "dhc", "0.0003940", 1, 0),
        (OLMO_7B, 4, "dhc", "0.0013124", 1, 4096),
        (OLMOE, 4, "dhc", "0.0003940", 1, 0),
    ],
)
def test_misprints_of_table_7(config, n, connection, printed, times, less):
    """SHC's parameters are printed ten times too large, and those of the 7B without one row of D a connection.

    The totals beside them are right.
    """
    fields = {**config.to_dict(), "hc_mult": n, "connection": connection}
    count = connection_parameters(fields) - less * 2 * config.num_hidden_layers
    assert f"{times * count / 1e9:.7f}" == printed
