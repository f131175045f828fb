"""Import what a tool's jobs import, once, and run every job in forks: imports take longer than jobs.

Usage: warm.py SCRIPT MODULE ...

Reads jobs, in JSON, a line each: the folder `place`, and `ranks`, how many processes form a group; 0 for none. Answers
each with the highest exit status.
"""

import importlib
import json
import os
import runpy
import signal
import socket
import sys
import traceback
from pathlib import Path

SECONDS = 600


def run(script: str, place: Path, ranks: int, rank: int, port: int) -> None:
    """Run a script as if it had been started in a folder, by torchrun if there are ranks."""
    signal.alarm(SECONDS)
    os.chdir(place)
    log = os.open(f"log{rank}", os.O_WRONLY | os.O_CREAT)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    if ranks:
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
        os.environ |= {name: str(value) for name, value in {**numbers, "MASTER_PORT": port}.items()}
        os.environ["MASTER_ADDR"] = "127.0.0.1"
    sys.argv = [script, str(place / "job.json")]
    runpy.run_path(script, run_name="__main__")


def forked(script: str, place: Path, ranks: int, rank: int, port: int) -> int:
    """Return the id of a process that runs a script."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        run(script, place, ranks, rank, port)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    """Answer jobs until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    script, *modules = sys.argv[1:]
    for module in modules:
        importlib.import_module(module)
    for line in sys.stdin:
        job = json.loads(line)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        arguments = script, Path(job["place"]), job["ranks"]
        children = [forked(*arguments, rank, port) for rank in range(max(1, job["ranks"]))]
        statuses = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
        print(max(map(abs, statuses)), file=answers, flush=True)


if __name__ == "__main__":
    main()
