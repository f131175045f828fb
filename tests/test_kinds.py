"""The table of connections: what it says of each kind is what the models do."""

import re
from dataclasses import fields

import numpy as np
import pytest
import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import LlamaForCausalLM

from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM, __version__, convert_model
from hf_hyperconn.analysis.costs import connection_flops, connection_parameters, kept_bytes
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.equivalent import hyper_connection_shapes, hyper_connection_tensors
from hf_hyperconn.conversion.fields import HyperConnectionFields
from hf_hyperconn.errors import ConversionError
from hf_hyperconn.kinds import CONVERTIBLE, FIELDS, FORMAT, KINDS, READOUTS
from hf_hyperconn.kinds.kind import NORM
from hf_hyperconn.models import configuration_hyper_connections
from hf_hyperconn.models.configuration_hyper_connections import (
    CONNECTIONS,
    FORMS,
    STARTS,
    HyperConnectionConfig,
)
from hf_hyperconn.models.configuration_hyper_connections import READOUTS as OF_MODELS

from .conftest import hc_llama, kept_for_a_token, llama_config
from .families import FAMILIES

CASES = {
    "shc": {},
    "dhc": {},
    "dhc, history": {"hc_start": "history", "hc_readout": "weighted"},
    "shc, history": {"hc_start": "history", "hc_history": "depth", "hc_readout": "weighted", "hc_mult": 3},
    "dhc, learned": {"hc_readout": "learned"},
    "dhc, weighted": {"hc_readout": "weighted"},
    "mhc": {},
    "ihc": {},
    "frac": {},
    "attnres": {"hc_mult": 1},
    "altup": {},
    "keel": {"hc_mult": 1},
    "dual": {"hc_mult": 2},
}
cases = pytest.mark.parametrize("case", CASES)


def model_of(case: str, **more) -> HCLlamaForCausalLM:
    return hc_llama(connection=case.partition(",")[0], **CASES[case], **more)


def test_names_are_those_of_the_models():
    assert set(KINDS) == set(CONNECTIONS)
    assert tuple(READOUTS) == OF_MODELS
    assert {field.name: field.default for field in fields(HyperConnectionConfig)} == {**FIELDS, "hc_format": 1}
    assert (FORMAT, __version__) == (configuration_hyper_connections.FORMAT, configuration_hyper_connections.VERSION)
    assert {case.partition(",")[0] for case in CASES} == set(KINDS)


@cases
def test_parameters_and_initial_values_are_those_of_a_new_model(case):
    model = model_of(case)
    config = {**model.config.to_dict()}
    ours = {name: p for name, p in model.named_parameters() if "_hc." in name or ".hc_head." in name}
    assert connection_parameters(config, ["weight"]) == sum(p.numel() for p in ours.values())
    if case.partition(",")[0] in CONVERTIBLE:
        expected = hyper_connection_tensors(config, FAMILIES["llama"], ["model.layers."])
        assert {name: value.shape for name, value in expected.items()} == dict(
            hyper_connection_shapes(config, FAMILIES["llama"], ["model.layers."])
        )
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            assert value.dtype == np.float32
            torch.testing.assert_close(ours[name].detach(), torch.from_numpy(value))


@cases
def test_a_conversion_equals_its_base(case, llama_folder, tmp_path):
    """In float32 and in its own dtype, as the verification finds."""
    chosen = {name: value for name, value in CASES[case].items() if name != "hc_readout"}
    if case.partition(",")[0] not in CONVERTIBLE or case in ("dhc, learned", "dhc, weighted"):
        pytest.skip("nothing is converted to it on disk")
    convert_checkpoint(str(llama_folder), tmp_path / "out", connection=case.partition(",")[0], **chosen, verify="full")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("layers", "block"), [(3, 1), (4, 1), (3, 2), (5, 3), (5, 4), (3, 100)])
def test_what_attention_residuals_keep(layers, block, dtype):
    plain = LlamaForCausalLM(llama_config(num_hidden_layers=layers)).to(dtype)
    model = hc_llama(connection="attnres", hc_mult=1, hc_block=block, num_hidden_layers=layers).to(dtype)
    added = kept_for_a_token(model) - kept_for_a_token(plain)
    assert kept_bytes(model.config.to_dict(), dtype.itemsize) == added


def test_what_altup_and_residual_keep():
    """Of ResiDual the readout's norm is in what is measured."""
    dtype = torch.bfloat16
    plain = kept_for_a_token(LlamaForCausalLM(llama_config()).to(dtype))
    altup, dual = hc_llama(connection="altup").to(dtype), hc_llama(connection="dual", hc_mult=2).to(dtype)
    assert kept_bytes(altup.config.to_dict(), dtype.itemsize) == kept_for_a_token(altup) - plain
    readout = 4 * (3 * dual.config.hidden_size + 1)
    assert kept_bytes(dual.config.to_dict(), dtype.itemsize) + readout == kept_for_a_token(dual) - plain


@pytest.mark.parametrize("block", [1, 2, 3, 5, 100])
def test_operations_of_attention_residuals_one_by_one(block):
    """Six for each value read, one to add what they make to the residual stream, two for what a sub-layer adds."""
    d, k = 24, 10
    values = [1 + -(-i // block) for i in range(k + 1)]
    expected = sum(6 * count + 1 for count in values) * d + 2 * k * d
    config = {"hidden_size": d, "num_hidden_layers": k // 2, "hc_mult": 1, "connection": "attnres", "hc_block": block}
    assert connection_flops(config) == expected


def test_operations_of_altup_residual_and_the_weighted_readout():
    config = {"hidden_size": 24, "num_hidden_layers": 3, "hc_mult": 4}
    assert connection_flops({**config, "connection": "altup"}) == connection_flops({**config, "connection": "shc"})
    assert connection_flops({**config, "connection": "dual", "hc_mult": 2}) == 6 * (2 + NORM) * 24 + (1 + NORM) * 24
    weighted = connection_flops({**config, "connection": "shc", "hc_readout": "weighted"})
    assert weighted - connection_flops({**config, "connection": "shc"}) == 4 * 24


@pytest.mark.parametrize("name", KINDS)
def test_an_absurd_config_costs_no_time(name):
    n = KINDS[name].most or 2**30
    config = {"hidden_size": 2**30, "num_hidden_layers": 2**31, "hc_mult": n, "connection": name}
    for cost in (connection_parameters(config, ["weight"]), connection_flops(config), kept_bytes(config, 2)):
        assert cost > 2**31


@pytest.mark.parametrize("name", KINDS)
def test_what_is_refused_has_the_reason_of_the_table(name, llama):
    kind = KINDS[name]
    if kind.no_equivalent:
        for convert in (
            lambda: HyperConnectionFields(connection=name),
            lambda: convert_model(llama, connection=name, hc_mult=kind.default_streams),
        ):
            with pytest.raises((ConversionError, ValueError), match=re.escape(kind.no_equivalent)):
                convert()
    elif kind.no_history:
        with pytest.raises(ConversionError, match=f"{name} can't start from the history: {kind.no_history}"):
            HyperConnectionFields(connection=name, hc_start="history")
        with pytest.raises(StrictDataclassError, match="hc_start is 'history'; .* can't start so"):
            convert_model(llama, connection=name, hc_start="history")
    else:
        model = convert_model(llama, connection=name, hc_start="history")
        assert (model.config.hc_readout, model.config.hc_mult) == ("weighted", 4)


@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("norm", [None, "dyt"])
@pytest.mark.parametrize("name", KINDS)
def test_the_table_and_the_configs_agree_on_what_has_an_equivalent(name, norm, form, start):
    kind = KINDS[name]
    config = {
        "connection": name,
        "hc_mult": kind.default_streams,
        "hc_start": start,
        "hc_attention": form,
        "norm": norm,
    }
    if start == "biased" and name not in ("mhc", "ihc"):
        pytest.skip("no such start")
    if form == "mean" and name != "attnres":
        pytest.skip("no such form")
    if kind.fault({**config, "hidden_size": 32}):
        return
    reason = kind.inequivalence(config)
    if reason is None:
        HCLlamaConfig.from_prenorm(llama_config(), **config)
    else:
        with pytest.raises(ValueError, match=f"(?i){re.escape(reason[:20])}"):
            HCLlamaConfig.from_prenorm(llama_config(), **config)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            {"connection": "xhc"},
            "connection 'xhc' was asked for; accepted are 'shc', 'dhc', 'mhc', 'ihc', 'frac', 'att",
        ),
        ({"hc_mult": 0}, "0 residual streams were asked for; give -n 1 or more"),
        ({"connection": "attnres", "hc_mult": 4}, "attnres has no 4 streams; give -n 1, or none"),
        ({"hc_block": 2}, "block 2 was asked for, which dhc doesn't have; leave it out"),
        ({"connection": "attnres", "hc_block": 0}, "hc_block 0, not a number of sub-layers was asked for"),
        ({"hc_history": "depth"}, "history 'depth' was asked for, but not the start 'history'"),
        ({"hc_start": "history", "hc_history": "size"}, "hc_history 'size', not one of 'type', 'depth' was asked"),
        ({"hc_start": "biased"}, "start 'biased' was asked for; a conversion takes 'copies' or 'history'"),
    ],
)
def test_refused_fields(arguments, message):
    with pytest.raises(ConversionError, match=re.escape(message)):
        HyperConnectionFields(**arguments)
