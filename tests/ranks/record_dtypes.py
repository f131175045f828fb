"""Run a script and write down, for each rank, the dtypes that its training had.

Usage: ... tests/ranks/record_dtypes.py FOLDER SCRIPT [ARGUMENT ...]

Writes `FOLDER/<rank>.json`: the dtypes of parameters of connections while they compute, of
the outputs of linear layers, and of all parameters, gradients and moments at the steps of the optimizer.
"""

import json
import os
import runpy
import sys
from collections import defaultdict
from pathlib import Path

from torch import nn
from torch.nn.modules.module import register_module_forward_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from hf_hyperconn import HyperConnection

seen = defaultdict(set)


def record_forward(module: nn.Module, args: tuple, output) -> None:
    """Of connections and of linear layers, in training."""
    if isinstance(module, HyperConnection) and module.training:
        seen["connection"] |= {str(parameter.dtype) for parameter in module.parameters()}
    elif isinstance(module, nn.Linear) and module.training:
        seen["linear output"].add(str(output.dtype))


def record_step(optimizer, args: tuple, kwargs: dict) -> None:
    """Of what the optimizer has."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            seen["parameter"].add(str(parameter.dtype))
            seen["gradient"].add(str(parameter.grad.dtype))
            seen["moment"].add(str(optimizer.state[parameter]["exp_avg"].dtype))


register_module_forward_hook(record_forward)
register_optimizer_step_post_hook(record_step)
_, folder, *sys.argv = sys.argv
runpy.run_path(sys.argv[0], run_name="__main__")
written = Path(folder, f"{os.environ.get('RANK', '0')}.json")
written.parent.mkdir(exist_ok=True)
written.write_text(json.dumps({name: sorted(dtypes) for name, dtypes in seen.items()}))
