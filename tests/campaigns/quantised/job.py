"""Run by the Python of a scheme's environment, without this package: runs code that makes a model, in several folders.

Reads a job in JSON from the file that is named first: folders, code, ids, noise, answer. Writes to the file `answer`
in each folder the logits of the code's `model`, its plain float32 parameters, and, where noise is asked for, the
logits with noise on the linear weights; or `error`, what the code raised.
"""

import json
import os
import sys
from pathlib import Path

import torch


def parameters(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return the float32 parameters that no scheme has packed."""
    tensors = {name: parameter.data for name, parameter in model.named_parameters()}
    return {
        name: tensor
        for name, tensor in tensors.items()
        if type(tensor) is torch.Tensor and tensor.dtype is torch.float32
    }


def add_noise(model: torch.nn.Module, noise: float) -> None:
    """Add normal noise, given as a share of each matrix's root mean square, to what schemes quantise."""
    generator = torch.Generator().manual_seed(0)
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear) and name != "lm_head":
            weight = module.weight
            drawn = torch.randn(weight.shape, generator=generator)
            weight.add_((noise * weight.float().square().mean().sqrt() * drawn).to(weight.dtype))


@torch.no_grad()
def answer(job: dict) -> dict:
    names = {}
    with torch.enable_grad():
        exec(job["code"], names)
    model, ids = names["model"].eval(), torch.tensor(job["ids"])
    tensors = {"logits": model(ids).logits.float(), "parameters": parameters(model)}
    if job["noise"]:
        add_noise(model, job["noise"])
        tensors["noisy"] = model(ids).logits.float()
    return tensors


def main() -> None:
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    for folder in job["folders"]:
        os.chdir(folder)
        try:
            found = answer(job)
        except Exception as error:
            found = {"error": f"{type(error).__name__}: {error}"}
        torch.save(found, job["answer"])


if __name__ == "__main__":
    main()
