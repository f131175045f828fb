"""Run on ranks: logits and texts of models that Transformers' `pp_size` splits, against the whole models.

Usage: torchrun ... tests/ranks/generating_stages.py CONVERSION ...
"""

import sys

import torch
import torch.distributed as dist
from transformers.distributed import DistributedConfig

from tests.other_families import class_of

OPTIONS = {"max_new_tokens": 6, "do_sample": False, "return_dict_in_generate": True, "output_logits": True}

dist.init_process_group("gloo")
stages = dist.get_world_size()
ids = torch.arange(3, 17).view(2, 7)
mask = torch.ones_like(ids)
mask[1, :3] = 0
for folder in sys.argv[1:]:
    model_class = class_of(folder)
    whole = model_class.from_pretrained(folder)
    split = model_class.from_pretrained(folder, distributed_config=DistributedConfig(pp_size=stages))
    assert len(split.state_dict()) < len(whole.state_dict())
    with torch.no_grad():
        expected, found = (model(ids, attention_mask=mask, use_cache=False).logits for model in (whole, split))
        assert torch.equal(found, expected)
        expected, found = (model.generate(ids, attention_mask=mask, **OPTIONS) for model in (whole, split))
    assert torch.equal(found.sequences, expected.sequences)
    assert torch.equal(torch.stack(found.logits), torch.stack(expected.logits))
    print(f"{folder}: {stages} stages generate alike on rank {dist.get_rank()}", flush=True)
dist.destroy_process_group()
