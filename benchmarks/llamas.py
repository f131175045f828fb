"""The small Llamas that benchmarks compare."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.timing import device
from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM

PLAIN = "plain"
FIELDS: dict[str, dict | None] = {  # of the config, by the names of models
    PLAIN: None,
    "SHC×4": {"connection": "shc"},
    "DHC×4": {"connection": "dhc"},
    "DHC×8": {"connection": "dhc", "hc_mult": 8},
    "mHC×4": {"connection": "mhc"},
    "attention residuals": {"connection": "attnres", "hc_mult": 1},
}


def build(shape: dict[str, int], name: str) -> PreTrainedModel:
    """Return the model of that name with random weights."""
    torch.manual_seed(0)
    if (fields := FIELDS[name]) is None:
        return LlamaForCausalLM(LlamaConfig(**shape)).to(device())
    return HCLlamaForCausalLM(HCLlamaConfig(**shape, **fields)).to(device())
