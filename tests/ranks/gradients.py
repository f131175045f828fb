"""Run on ranks: gradients of the ranks' parts of a batch, reduced by accelerate, against those of the whole batch.

Usage: accelerate launch ... tests/ranks/gradients.py CONVERSION
"""

import re
import sys

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tests.other_families import class_of, inputs_of, loss_of
from tests.tolerances import REDUCED_GRADIENTS

UNREAD = "pooler."  # which a loss on last hidden states does not read


def loaded(folder: str) -> PreTrainedModel:
    model = class_of(folder).from_pretrained(folder)
    model.config.use_cache = False  # which layers that are run twice would fill twice
    return model


accelerator = Accelerator(cpu=True)
whole = loaded(sys.argv[1])
batch = inputs_of(whole)
loss_of(whole, batch).backward()
expected = {name: parameter.grad for name, parameter in whole.named_parameters() if UNREAD not in name}

model = loaded(sys.argv[1])
model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
rows = {name: each.chunk(accelerator.num_processes)[accelerator.process_index] for name, each in batch.items()}
accelerator.backward(loss_of(model, rows))
reduced = {}
for name, parameter in model.named_parameters():
    if UNREAD in name:
        continue
    gradient = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
    reduced[re.sub(r"^module\.|_checkpoint_wrapped_module\.", "", name)] = gradient
# under FSDP the first rank alone has loaded the weights
if accelerator.is_main_process:
    assert reduced.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient.any(), name
        torch.testing.assert_close(reduced[name], gradient, **REDUCED_GRADIENTS)
    print(f"gradients of {accelerator.num_processes} {accelerator.distributed_type.value} ranks agree")
del model, parameter
accelerator.free_memory()  # or threads of gloo may outlive Python, and abort
accelerator.end_training()
