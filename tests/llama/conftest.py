"""A tiny HC-Llama, which stands for all families."""

import copy

import pytest

from hf_hyperconn import HCLlamaConfig, convert_model
from tests.conftest import llama_config, randomise_connections


def hc_config(**changes) -> HCLlamaConfig:
    fields = {name: changes.pop(name) for name in list(changes) if name.startswith("hc_") or name == "connection"}
    return HCLlamaConfig.from_prenorm(llama_config(**changes), **fields)


@pytest.fixture
def hc(llama):
    """The tiny Llama with random, so not equivalent, hyper-connections."""
    return randomise_connections(convert_model(copy.deepcopy(llama), hc_mult=4))
