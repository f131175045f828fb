"""Work side by side in forks of this process."""

import gc
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence


def side_by_side(items: Sequence, work: Callable[[int, object], list], workers: int) -> Iterator[list]:
    """What `work(worker, item)` returns for every item, as it comes; it must go through JSON in a line.

    This process must have no other threads. Raises `RuntimeError` when a worker fails; it says why on stderr.
    """
    gc.freeze()
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    children = []
    for worker in range(workers):
        if not (child := os.fork()):
            os.close(reading)
            _work(worker, items[worker::workers], work, writing)
        children.append(child)
    os.close(writing)
    try:
        with open(reading, encoding="utf-8") as lines:
            for line in lines:
                yield json.loads(line)
    except BaseException:
        for child in children:
            os.kill(child, signal.SIGTERM)
        raise
    finally:
        codes = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    if any(codes):
        raise RuntimeError(f"workers ended with {codes}")


def _work(worker: int, items: Sequence, work: Callable[[int, object], list], writing: int) -> None:
    code, item = 1, None
    try:
        with open(writing, "wb", buffering=0) as pipe:
            for item in items:
                line = json.dumps(work(worker, item)).encode() + b"\n"
                assert len(line) < 4096, "written in one piece, so that lines of workers don't mix"
                pipe.write(line)
        code = 0
    except BaseException:
        print(f"the harness itself fails with {item}", file=sys.stderr)
        traceback.print_exc()
    finally:
        os._exit(code)
