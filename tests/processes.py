"""Running processes that can't import hf_hyperconn."""

import json
import os
import secrets
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from .isolated import BLOCKED, Program, run


def elsewhere(jobs: list[dict], place: Path) -> dict[str, list[str]]:
    """Return the differences that processes of `elsewhere.py` find; they run side by side, one for each job."""
    code = Path(__file__).with_name("elsewhere.py").read_text(encoding="utf-8")
    programs = [
        Program(code, [], str(place), str(place / f"modules {i}"), json.dumps(job)) for i, job in enumerate(jobs)
    ]
    differences = {}
    for done in run(programs):
        assert done.returncode == 0, done.stderr
        differences |= json.loads(done.stdout)
    return differences


def without_package(place: Path) -> dict[str, str]:
    """Return an environment in which programs can't import hf_hyperconn, even where it is installed."""
    site = place / "site"
    site.mkdir(parents=True)
    (site / "sitecustomize.py").write_text(BLOCKED)
    return {**os.environ, "PYTHONPATH": str(site), "HF_MODULES_CACHE": str(place / "modules")}


def free_port() -> int:
    """Return a port that nobody listens on, below those that Linux gives to whoever names none."""
    while True:
        port = 20000 + secrets.randbelow(12000)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


@contextmanager
def serving(command: list[str], place: Path, environment: dict[str, str], patience: float = 120) -> Iterator[str]:
    """The address of a server, once it says that it is healthy; the server is ended whatever happens.

    command: starts it; `--host` and `--port` are added.
    patience: seconds to wait for it.
    """
    port = free_port()
    address, log = f"http://127.0.0.1:{port}", place / f"server {port}.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            [*command, "--host", "127.0.0.1", "--port", str(port)],
            cwd=place,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        deadline = time.monotonic() + patience
        while not _is_healthy(address):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _is_healthy(address: str) -> bool:
    try:
        with urlopen(f"{address}/health", timeout=10) as answer:
            return answer.status == 200
    except (URLError, ConnectionError, TimeoutError):
        return False
