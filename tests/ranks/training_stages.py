"""Run on ranks: losses and gradients of stages under 1F1B, against the whole model.

Usage: torchrun ... tests/ranks/training_stages.py CONVERSION ...
"""

import sys
from functools import partial

import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage, Schedule1F1B

from hf_hyperconn import pipeline_stages
from tests.other_families import class_of

MICROBATCHES = 4

dist.init_process_group("gloo")
rank, n = dist.get_rank(), dist.get_world_size()
ids = torch.randint(3, 60, (2 * MICROBATCHES, 12), generator=torch.Generator().manual_seed(0))
mask = torch.ones_like(ids)
mask[1::2, :3] = 0
for folder in sys.argv[1:]:
    model = class_of(folder).from_pretrained(folder)
    loss = partial(model.loss_function, vocab_size=model.config.vocab_size)
    expected = []
    for rows, rows_mask in zip(ids.chunk(MICROBATCHES), mask.chunk(MICROBATCHES), strict=True):
        each = loss(model(rows, attention_mask=rows_mask, use_cache=False).logits, rows)
        each.backward()
        expected.append(each.detach())
    gradients = {name: parameter.grad / MICROBATCHES for name, parameter in model.named_parameters()}
    assert sum(gradient.any() for gradient in gradients.values()) > 0.9 * len(gradients)
    model.zero_grad()

    module = pipeline_stages(model, n)[rank]
    assert {id(p) for p in module.parameters()} < {id(p) for p in model.parameters()}
    schedule = Schedule1F1B(PipelineStage(module, rank, n, torch.device("cpu")), MICROBATCHES, loss_fn=loss)
    losses: list[torch.Tensor] = []
    schedule.step(
        *(ids,) * module.is_first, target=ids if module.is_last else None, losses=losses, attention_mask=mask
    )
    if module.is_last:
        assert torch.equal(torch.stack([each.detach() for each in losses]), torch.stack(expected))
    for name, parameter in module.model.named_parameters():
        assert torch.equal(parameter.grad, gradients[name]), name
    names: list = [None] * n
    dist.all_gather_object(names, [name for name, _ in module.model.named_parameters()])
    assert sorted(sum(names, [])) == sorted(gradients)
    print(f"{folder}: losses and gradients of {n} stages agree on rank {rank}", flush=True)
dist.destroy_process_group()
