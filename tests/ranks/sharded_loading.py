"""Run on ranks: a base converted while Transformers shards it (FSDP2) has the parameters of a whole conversion.

Usage: torchrun ... tests/ranks/sharded_loading.py BASE
"""

import sys

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from transformers.distributed import DistributedConfig

from hf_hyperconn import HCLlamaForCausalLM

dist.init_process_group("gloo")
ranks = DistributedConfig(fsdp_size=dist.get_world_size())
sharded = dict(HCLlamaForCausalLM.from_prenorm(sys.argv[1], distributed_config=ranks).named_parameters())
whole = dict(HCLlamaForCausalLM.from_prenorm(sys.argv[1]).named_parameters())
assert sharded.keys() == whole.keys()
for name, parameter in sharded.items():
    assert isinstance(parameter, DTensor), name
    assert torch.equal(parameter.full_tensor(), whole[name]), name
print(f"{len(whole)} parameters are equal on rank {dist.get_rank()}")
dist.destroy_process_group()
