"""Run a script as it is, on ranks of a CPU, with the parts of accelerate that it keeps for accelerators.

Usage: accelerate launch ... tests/ranks/on_cpu.py SCRIPT [ARGUMENT ...]

On a CPU accelerate replaces FSDP by DDP silently and refuses tensor parallelism. It does so by the type of its
ranks alone; FSDP2 and tensor parallelism themselves work over gloo.
"""

import runpy
import sys

from accelerate import PartialState
from accelerate.utils import DistributedType

initialise = PartialState.__init__


def initialise_as_accelerators(self, *args, **kwargs):
    """Name the ranks after an accelerator once they are connected as those of a CPU."""
    initialise(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_XPU


PartialState.__init__ = initialise_as_accelerators
sys.argv.pop(0)
runpy.run_path(sys.argv[0], run_name="__main__")
