"""Ranks for the distributed tests: processes on this machine that talk over gloo on CPU."""

import os
import secrets
import socket
import sys
from contextlib import suppress
from functools import partial
from multiprocessing import set_forkserver_preload

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# every rank is forked from a process that has imported these, which takes longer than most tests
set_forkserver_preload(["transformers", "hf_hyperconn", "tests.test_tensor_parallel_mixin", "tests.test_fsdp_mixin"])


def _get_distributed_backend() -> str:
    return "gloo"


def _get_distributed_device_type() -> str:
    return "cpu"


def _get_rank_device(rank: int) -> torch.device:
    return torch.device("cpu")


def _set_rank_device(rank: int) -> None:
    torch.set_num_threads(1)


def _start_rank_processes(function, args: tuple, nprocs: int, **kwargs) -> None:
    """Run `function(rank, *args)` in `nprocs` processes; an exception in one of them is raised here."""
    mp.start_processes(_run_and_leave, args=(function, args), nprocs=nprocs, start_method="forkserver")


def _run_and_leave(rank: int, function, args: tuple) -> None:
    """Without the interpreter's own exit, in which threads of gloo abort the process now and then."""
    function(rank, *args)
    sys.stdout.flush()
    os._exit(0)


def _run_rank(rank: int, function, args: tuple, world_size: int, port: int) -> None:
    address = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    os.environ.update(address, RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    _set_rank_device(rank)
    dist.init_process_group(_get_distributed_backend(), rank=rank, world_size=world_size)
    try:
        function(rank, *args)
    finally:
        dist.destroy_process_group()


def _free_port() -> int:
    """Return a port that nobody listens on, below those that Linux gives to whoever names none, as gloo."""
    while True:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("localhost", port))
            return port


def run_distributed(world_size: int):
    """Make a call of `function(*args)` run `function(rank, *args)` on `world_size` ranks of one process group."""

    def call(function, *args):
        _start_rank_processes(_run_rank, args=(function, args, world_size, _free_port()), nprocs=world_size)

    return lambda function: partial(call, function)
