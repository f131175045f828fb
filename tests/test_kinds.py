"""The table of connections: what it says of each kind is what the models do."""

import re
from dataclasses import fields
from functools import partial
from itertools import product

import numpy as np
import pytest
import torch
from transformers import LlamaForCausalLM

from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM, __version__, convert_model
from hf_hyperconn.analysis.costs import connection_flops, connection_parameters, kept_bytes
from hf_hyperconn.conversion.checkpoint.connection_options import INEXACT, fields_of_conversion
from hf_hyperconn.conversion.convert import convert_checkpoint
from hf_hyperconn.conversion.verify.start import hyper_connection_shapes, hyper_connection_tensors
from hf_hyperconn.errors import ConversionError
from hf_hyperconn.kinds import CONVERTIBLE, FIELDS, KINDS, READOUTS
from hf_hyperconn.kinds.kind import NORM
from hf_hyperconn.models.configuration_hyper_connections import VERSION, HyperConnectionConfig
from hf_hyperconn.models.connection_fields import (
    ACCEPTED,
    CHOICES,
    GivenFields,
    complete,
    fault_of_fields,
    inequivalence,
)

from .conftest import hc_llama, kept_for_a_token, llama_config
from .families import FAMILIES

CASES = {
    **{name: {} for name in KINDS},
    "dhc, history": {"hc_start": "history"},
    "shc, history": {"hc_start": "history", "hc_history": "depth", "hc_mult": 3},
    "dhc, learned": {"hc_readout": "learned"},
    "dhc, weighted": {"hc_readout": "weighted"},
    "shc, weighted of three": {"hc_readout": "weighted", "hc_mult": 3},
    "mhc, eps": {"hc_eps": 1e-3, "hc_sinkhorn_iters": 3},
    "altup, same": {"hc_selection": "same"},
    "attnres, blocks": {"hc_block": 2},
}
cases = pytest.mark.parametrize("case", CASES)


def model_of(case: str, **more) -> HCLlamaForCausalLM:
    return hc_llama(**complete({"connection": case.partition(",")[0], **CASES[case]}), **more)


def test_names_are_those_of_the_models():
    assert set(KINDS) == set(ACCEPTED) == set(CHOICES["connection"])
    assert set(READOUTS) == set(CHOICES["hc_readout"])
    assert FIELDS.keys() == GivenFields.__annotations__.keys()
    assert {field.name for field in fields(HyperConnectionConfig)} == {*FIELDS, "hc_format"}
    assert __version__ == VERSION


@cases
def test_parameters_and_initial_values_are_those_of_a_new_model(case):
    model = model_of(case)
    config = model.config.to_dict()
    ours = {name: p for name, p in model.named_parameters() if "_hc." in name or ".hc_head." in name}
    assert connection_parameters(config, ["weight"]) == sum(p.numel() for p in ours.values())
    if case.partition(",")[0] in CONVERTIBLE:
        expected = hyper_connection_tensors(config, FAMILIES["llama"], ["model.layers."])
        shapes = hyper_connection_shapes(config, FAMILIES["llama"], ["model.layers."])
        assert {name: value.shape for name, value in expected.items()} == dict(shapes)
        assert ours.keys() == expected.keys()
        for name, value in expected.items():
            assert value.dtype == np.float32
            torch.testing.assert_close(ours[name].detach(), torch.from_numpy(value))


@cases
def test_a_conversion_equals_its_base(case, llama_folder, tmp_path):
    """In float32 and in its own dtype, as the verification finds."""
    name = case.partition(",")[0]
    if name not in CONVERTIBLE or CASES[case].get("hc_readout") in INEXACT:
        pytest.skip("nothing is converted to it on disk")
    convert_checkpoint(str(llama_folder), tmp_path / "out", connection=name, **CASES[case], verify="full")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("layers", "block"), [(3, 1), (4, 1), (3, 2), (5, 3), (5, 4), (3, 100)])
def test_what_attention_residuals_keep(layers, block, dtype):
    plain = LlamaForCausalLM(llama_config(num_hidden_layers=layers)).to(dtype)
    model = hc_llama(connection="attnres", hc_mult=1, hc_block=block, num_hidden_layers=layers).to(dtype)
    added = kept_for_a_token(model) - kept_for_a_token(plain)
    assert kept_bytes(model.config.to_dict(), dtype.itemsize) == added


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layers", [2, 5])
def test_what_skips_from_the_embedding_keep(layers, dtype):
    plain = LlamaForCausalLM(llama_config(num_hidden_layers=layers)).to(dtype)
    model = hc_llama(connection="skip", hc_mult=2, num_hidden_layers=layers).to(dtype)
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
    n = ACCEPTED[name].most or 2**30
    config = {"hidden_size": 2**30, "num_hidden_layers": 2**31, "hc_mult": n, "connection": name}
    for cost in (connection_parameters(config, ["weight"]), connection_flops(config), kept_bytes(config, 2)):
        assert cost > 2**31


@pytest.mark.parametrize("name", KINDS)
def test_every_door_refuses_with_the_reason_of_the_table(name, llama):
    kind = ACCEPTED[name]
    if kind.no_equivalent:
        given = {"connection": name}
        reason = f"(got {name!r}): {kind.no_equivalent}, so no pretrained model computes the"
    elif "history" not in kind.starts:
        given = {"connection": name, "hc_start": "history"}  # the biased start isn't offered: it isn't exact
        reason = f"must be 'copies' with connection {name!r} (got 'history'): 'shc' or 'dhc' can start so"
    else:
        model = convert_model(llama, connection=name, hc_start="history")
        assert (model.config.hc_readout, model.config.hc_mult) == ("weighted", 4)
        return
    doors = (
        partial(fields_of_conversion, **given),
        partial(convert_model, llama, **given),
        partial(HCLlamaConfig.from_prenorm, llama.config, **given),
        partial(HCLlamaForCausalLM.from_prenorm, "nowhere", config=llama.config, **given),
    )
    for door in doors:
        with pytest.raises((ConversionError, ValueError), match=re.escape(reason)):
            door()


@pytest.mark.parametrize("name", KINDS)
def test_the_table_and_the_configs_agree_on_what_has_an_equivalent(name):
    for start, form, norm in product(CHOICES["hc_start"], CHOICES["hc_attention"], (None, "dyt")):
        given = {"connection": name, "hc_start": start, "hc_attention": form, "norm": norm}
        if fault_of_fields(complete(given)):
            continue
        if reason := inequivalence(given):
            with pytest.raises(ValueError, match=re.escape(reason)):
                HCLlamaConfig.from_prenorm(llama_config(), **given)
        else:
            HCLlamaConfig.from_prenorm(llama_config(), **given)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"connection": "xhc"}, "connection must be 'shc', 'dhc', 'mhc', 'ihc', 'frac', 'keel', 'attnres',"),
        ({"hc_mult": 0}, "hc_mult must be a whole number, at least 1 (got 0)"),
        ({"hc_mult": True}, "hc_mult must be a whole number, at least 1 (got True)"),
        ({"connection": "mhc", "hc_mult": 1}, "hc_mult must be at least 2 with connection 'mhc' (got 1)"),
        ({"connection": "attnres", "hc_mult": 4}, "hc_mult must be 1 with connection 'attnres' (got 4)"),
        ({"connection": "attnres", "hc_block": 0}, "hc_block must be a whole number, at least 1 (got 0)"),
        ({"hc_start": "history", "hc_history": "size"}, "hc_history must be 'type' or 'depth' (got 'size')"),
        ({"hc_start": "history", "hc_readout": "mean"}, "hc_readout must be 'weighted' with hc_start 'history'"),
        ({"connection": "frac", "hc_readout": "sum"}, "hc_readout must be 'mean' with connection 'frac' (got 'sum')"),
        ({"connection": "mhc", "hc_eps": 0.2}, "hc_eps must be at least 1e-30 and below 0.1 (got 0.2)"),
        ({"hc_readout": "learned", "hc_eps": 0.3}, "hc_eps must be at least 1e-30 and below 0.25 (got 0.3)"),
        ({"connection": "mhc", "hc_start": "biased"}, "hc_start must be 'copies' or 'history' in a conversion"),
        ({"norm": "derf"}, "norm must be None in a conversion (got 'derf'): DyT and Derf compute another function"),
        ({"hc_block": 2}, "hc_block must be 1 with connection 'dhc' (got 2): 'dhc' doesn't read it"),
        ({"connection": "shc", "hc_tanh": False}, "hc_tanh must be True with connection 'shc' (got False)"),
        ({"hc_history": "depth"}, "hc_history must be 'type' with hc_start 'copies' (got 'depth')"),
        ({"connection": "attnres", "hc_eps": -1.0}, "hc_eps must be a number, at least 1e-30 (got -1.0)"),
        (
            {"connection": "mhc", "hc_eps": 0},
            "hc_eps must be a number, at least 1e-30 (got 0): zeros are normed with it",
        ),
        ({"connection": "attnres", "hc_eps": float("nan")}, "hc_eps must be a number, at least 1e-30 (got nan)"),
        ({"hc_eps": 0.5}, "hc_eps must be 1e-06 with connection 'dhc' (got 0.5)"),
        ({"hc_tanh": "no"}, "hc_tanh must be True or False (got 'no')"),
        ({"norm_alpha_other": 0.5}, "norm_alpha_other must be None with norm None (got 0.5): no norm is replaced"),
        ({"n": 4}, f"fields of connections are {', '.join(FIELDS)} (got n); hc_mult is the number of streams"),
    ],
)
def test_refused_fields(given, message, llama):
    for door in (fields_of_conversion, partial(convert_model, llama)):
        with pytest.raises((ConversionError, ValueError), match=re.escape(message)):
            door(**given)


@pytest.mark.parametrize("readout", INEXACT)
def test_what_is_not_exact_is_converted_in_memory_alone(readout, llama):
    with pytest.raises(ConversionError, match="hc_readout must be 'mean' or 'weighted' in a folder that equals its"):
        fields_of_conversion(hc_readout=readout)
    assert convert_model(llama, hc_readout=readout).config.hc_readout == readout
