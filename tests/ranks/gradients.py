"""Run on ranks: gradients of the ranks' parts of a batch, reduced by accelerate, against those of the whole batch.

Usage: accelerate launch ... tests/ranks/gradients.py BASE
"""

import re
import sys

import torch
from accelerate import Accelerator
from torch.distributed.tensor import DTensor

from hf_hyperconn import HCLlamaForCausalLM
from hf_hyperconn.models.sub_layers import is_of_connection
from tests.tolerances import REDUCED_GRADIENTS


def separated(base: str) -> HCLlamaForCausalLM:
    """A conversion whose streams differ, so that all of its gradients do."""
    model = HCLlamaForCausalLM.from_prenorm(base)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if is_of_connection(name):
            parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model


accelerator = Accelerator(cpu=True)
batch = torch.randint(3, 500, (4, 32), generator=torch.Generator().manual_seed(1))
whole = separated(sys.argv[1])
whole(batch, labels=batch).loss.backward()
expected = {name: parameter.grad for name, parameter in whole.named_parameters()}

model = separated(sys.argv[1])
model, _ = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
rows = batch.chunk(accelerator.num_processes)[accelerator.process_index]
accelerator.backward(model(rows, labels=rows).loss)
reduced = {}
for name, parameter in model.named_parameters():
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
