"""The small Llamas that benchmarks compare."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.timing import device
from hf_hyperconn import HCLlamaConfig, HCLlamaForCausalLM


def build(shape: dict[str, int], fields: dict | None) -> PreTrainedModel:
    """Return a model of random weights: the plain one, or with the connections that the config's `fields` ask for."""
    torch.manual_seed(0)
    if fields is None:
        return LlamaForCausalLM(LlamaConfig(**shape)).to(device())
    return HCLlamaForCausalLM(HCLlamaConfig(**shape, **fields)).to(device())
