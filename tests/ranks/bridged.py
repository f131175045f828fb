"""Run on ranks: folders whose layers get the cache by another name equal their bases, by TP and by FSDP2.

Usage: torchrun ... tests/ranks/bridged.py BASE CONVERSION
"""

import sys

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM
from transformers.distributed import DistributedConfig

from tests.tolerances import RANKS_LOGITS

dist.init_process_group("gloo")
base, folder = sys.argv[1:]
ids = torch.arange(3, 11)[None]
expected = AutoModelForCausalLM.from_pretrained(base)(ids).logits.detach()
for way in ("tp_size", "fsdp_size"):
    ranks = DistributedConfig(**{way: dist.get_world_size()})
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, distributed_config=ranks)
    hooks = {type(hook).__name__ for each in model.modules() for hook in each._forward_pre_hooks.values()}
    assert "CacheNamedAs" in hooks
    torch.testing.assert_close(model(ids).logits.detach(), expected, **RANKS_LOGITS)
    print(f"{way}: logits agree on rank {dist.get_rank()}", flush=True)
dist.destroy_process_group()
