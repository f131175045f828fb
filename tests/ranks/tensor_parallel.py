"""Run on ranks: logits of models that Transformers' tensor parallelism splits, against those of one process.

Usage: torchrun ... tests/ranks/tensor_parallel.py CONVERSION ...
"""

import sys

import torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig

from tests.other_families import class_of, inputs_of
from tests.tolerances import RANKS_LOGITS

dist.init_process_group("gloo")
for folder in sys.argv[1:]:
    model_class = class_of(folder)
    whole = model_class.from_pretrained(folder)
    split = model_class.from_pretrained(folder, distributed_config=DistributedConfig(tp_size=dist.get_world_size()))
    assert sum(p.to_local().numel() if hasattr(p, "to_local") else p.numel() for p in split.parameters()) < sum(
        p.numel() for p in whole.parameters()
    )
    inputs = inputs_of(whole)
    with torch.no_grad():
        torch.testing.assert_close(split(**inputs).logits, whole(**inputs).logits, **RANKS_LOGITS)
    print(f"{model_class.__name__}: logits agree on rank {dist.get_rank()}", flush=True)
dist.destroy_process_group()
