"""Running the commands of docs/training.md on a tiny model."""

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

from .pages import REPOSITORY, snippets
from .processes import free_port

PAGE = (REPOSITORY / "docs" / "training.md").read_text(encoding="utf-8")
BLOCKS = [code for language, code in snippets("docs/training.md") if language == "bash"]
COMMANDS = [shlex.split(line) for block in BLOCKS for line in block.replace("\\\n", "").splitlines()]
ON_CPU, TO_THE_END = "tests/ranks/on_cpu.py", "tests/ranks/to_the_end.py"
WITHOUT_SHUTDOWN = "tests/ranks/without_shutdown.py"
SCRIPT = "examples/continue_pretraining.py"

# what makes a run small; the learning rates are such that twenty steps show
TINY = shlex.split(
    "--sequence_length 64 --gradient_accumulation_steps 1 --max_steps 20 --save_steps 10 --logging_steps 1 "
    "--learning_rate 4e-4 --hc_lr 4e-3 --bf16 false --use_cpu --disable_tqdm true"
)


def documented(word: str) -> list[str]:
    """Return the one command of the page that has this word."""
    (command,) = [command for command in COMMANDS if word in command]
    return list(command)


def settings(model: Path, texts: Path, output: Path, batch: int = 4) -> list[str]:
    """Arguments of a tiny run, to be added to those of a command."""
    given = {"model": model, "train_files": texts, "held_out_files": texts.with_name("tinystories_valid.txt")}
    given |= {"output_dir": output, "per_device_train_batch_size": batch}
    return [word for name, value in given.items() for word in (f"--{name}", str(value))] + TINY


def on_ranks(command: list[str], ranks: int, added: list[str], before: tuple[str, ...] = ()) -> list[str]:
    """A documented command on so many ranks and a free port, with words `before` and `added` after the script's."""
    launcher, script, port = command[: command.index(SCRIPT)], command[command.index(SCRIPT) :], str(free_port())
    if TO_THE_END not in before:
        before = (WITHOUT_SHUTDOWN, *before)
    if launcher[0] == "torchrun":
        launcher[launcher.index("--nproc_per_node") + 1] = str(ranks)
        return [*launcher, "--master_port", port, *before, *script, *added]
    return [*launcher, "--num_processes", str(ranks), "--main_process_port", port, *before, *script, *added]


def environment(threads: int = 1) -> dict[str, str]:
    """Return the variables of a process with this package and no GPU, whose ranks meet on this machine alone."""
    variables = {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    if sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return {**os.environ, **variables}


def run(*commands: list[str]) -> str:
    """Run commands side by side, from the repository; what they print."""
    programs = Path(sys.executable).parent
    running = [
        subprocess.Popen(
            [str(programs / command[0]), *command[1:]],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            cwd=REPOSITORY,
            env=environment(),
            start_new_session=True,
        )
        for command in commands
    ]
    printed = []
    try:
        for process in running:
            printed.append(process.communicate(timeout=300)[0])
            assert process.returncode == 0, printed[-1][-8000:]
    finally:
        for process in running:
            if process.poll() is None:
                os.killpg(process.pid, 9)
                process.wait()
    return "".join(printed)


def run_on_ranks(ranks: int, program: str, *arguments: str) -> str:
    """Run a program of PyTorch's on so many ranks of this machine; what they print."""
    launcher = ["torchrun", "--standalone", f"--nproc_per_node={ranks}", WITHOUT_SHUTDOWN]
    return run([*launcher, program, *arguments])


def losses(folder: Path) -> list[float]:
    """Return the losses that a finished run has logged, by step."""
    state = json.loads((folder / "trainer_state.json").read_text(encoding="utf-8"))
    return [entry["loss"] for entry in state["log_history"] if "loss" in entry]


def gradients_of_ranks(engine: str, folder: Path) -> str:
    """What `tests/ranks/gradients.py` says of a conversion on two ranks."""
    command = on_ranks(documented(engine), 2, [], before=(ON_CPU,) if "fsdp" in engine else ())
    command[command.index(SCRIPT) :] = ["tests/ranks/gradients.py", str(folder)]
    return run(command)
