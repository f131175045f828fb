"""Programs that can't import hf_hyperconn, as where there are a folder and Transformers alone.

Each is a fork of one process that has imported Transformers, which takes seconds. As a script, this file is that one.
"""

import atexit
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import ModuleType

BLOCKED = 'import sys\n\nsys.modules["hf_hyperconn"] = None\n'
STREAMS = ("stdin", "stdout", "stderr")


@dataclass
class Program:
    """A program, and where it runs.

    arguments: its `sys.argv[1:]`. stdin: what it can read there.
    modules: where the code of the folders that it loads is copied.
    """

    code: str
    arguments: list[str]
    place: str
    modules: str
    stdin: str = ""


def isolated(
    code: str, *arguments, place: Path, modules: Path | None = None, stdin: str = "", **variables: str
) -> subprocess.CompletedProcess:
    """A program that has run, and the text that it printed.

    arguments: are handed to it as text. modules: `place / "modules"` by default.
    variables: of its environment; with any it is a new process, as what is imported reads some of them.
    """
    modules = modules or place / "modules"
    if not variables:
        (done,) = run([Program(code, [*map(str, arguments)], str(place), str(modules), stdin)])
        return done
    environment = {**os.environ, "PYTHONPATH": "", "HF_MODULES_CACHE": str(modules), **variables}
    command = [sys.executable, "-c", BLOCKED + code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, input=stdin, cwd=place, env=environment)


def printed(code: str, *arguments, **keywords) -> str:
    """What a program prints, like `isolated`, which must not fail."""
    done = isolated(code, *arguments, **keywords)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run(programs: list[Program]) -> list[subprocess.CompletedProcess]:
    """Programs that have run, side by side."""
    with tempfile.TemporaryDirectory(prefix="isolated_") as folder:
        jobs = [(Path(folder, str(i)), program) for i, program in enumerate(programs)]
        for streams, program in jobs:
            streams.mkdir()
            (streams / "stdin").write_text(program.stdin, encoding="utf-8")
        codes = _answer(json.dumps([(str(streams), asdict(program)) for streams, program in jobs]))
        return [
            subprocess.CompletedProcess(
                program.arguments, code, *((streams / name).read_text(encoding="utf-8") for name in STREAMS[1:])
            )
            for (streams, program), code in zip(jobs, codes, strict=True)
        ]


def _answer(line: str) -> list[int]:
    """The exit codes of a line of programs. Where there is no answer, nobody else gets a late one."""
    process = _process()
    try:
        process.stdin.write(line + "\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())
    except BaseException:
        _process.cache_clear()
        os.killpg(process.pid, signal.SIGKILL)  # with the programs that run
        raise


@cache
def _process() -> subprocess.Popen:
    process = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": ""},
        start_new_session=True,
    )
    atexit.register(process.communicate)
    return process


def _serve() -> None:
    """Answer a line of programs with their exit codes, until there are no more."""
    sys.modules["hf_hyperconn"] = None
    import transformers.models.llama.modeling_llama  # noqa: F401

    gc.freeze()
    for line in sys.stdin:
        children = []
        for streams, program in json.loads(line):
            if not (child := os.fork()):
                _become(Path(streams), Program(**program))
            children.append(child)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)


def _become(streams: Path, program: Program) -> None:
    from transformers import dynamic_module_utils

    code = 1
    try:
        for number, name in enumerate(STREAMS):
            os.dup2(os.open(streams / name, os.O_RDWR | os.O_CREAT), number)
        sys.stdin = os.fdopen(0, encoding="utf-8")
        os.environ["HF_MODULES_CACHE"] = dynamic_module_utils.HF_MODULES_CACHE = program.modules
        os.chdir(program.place)
        sys.argv = ["-c", *program.arguments]
        sys.modules["__main__"] = main = ModuleType("__main__")
        exec(program.code, vars(main))
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
