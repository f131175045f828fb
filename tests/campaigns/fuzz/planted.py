"""Command lines with a planted defect each; prints, as JSON, what the harness says of each.

python -m tests.campaigns.fuzz.planted
"""

import json
import os
import shutil
import sys
import time
from pathlib import Path

from huggingface_hub import HfApi

from hf_hyperconn.conversion import cli

from . import cases, judge
from .cases import Case
from .children import side_by_side
from .commands import run_case
from .mutations.values import PRECIOUS, PRIVATE
from .starts import build_starts, prepared

SEEDS = 40  # that make the same case twice
SECONDS = 4  # of the limit of what hangs
CONVERT = ("convert", "base", "out", "-n", "2", "--verify", "structure", "-q")
PUSH = ("push", "hc", "me/case", "-q")


def faithful(arguments: list[str]) -> int:
    return cli.main(arguments)


def half_an_out(arguments: list[str]) -> int:
    Path("out").mkdir()
    Path("out", "config.json").write_text("{}")
    print("error: the disk is full", file=sys.stderr)
    return 1


def out_without_a_shard(arguments: list[str]) -> int:
    code = cli.main(arguments)
    Path("out", "model-00001-of-00002.safetensors").unlink()
    return code


def other_weights(arguments: list[str]) -> int:
    code = cli.main(arguments)
    with Path("out", "model-00001-of-00002.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x7f")
    return code


def other_config(arguments: list[str]) -> int:
    code, path = cli.main(arguments), Path("out", "config.json")
    path.write_text(json.dumps({**json.loads(path.read_text()), "hc_readout": "sum"}))
    return code


def changed_source(arguments: list[str]) -> int:
    Path("base", "config.json").chmod(0o600)
    return cli.main(arguments)


def lost_file(arguments: list[str]) -> int:
    shutil.rmtree("out")
    return cli.main(arguments)


def leak(arguments: list[str]) -> int:
    code = cli.main(arguments)
    shutil.copy("../outside/secret.txt", "out/notes.txt")
    return code


def written_elsewhere(arguments: list[str]) -> int:
    Path("../outside/more.txt").write_text("more")
    return cli.main(arguments)


def published(arguments: list[str]) -> int:
    code = cli.main(arguments)
    HfApi().upload_file(path_or_fileobj=PRIVATE, path_in_repo="notes.txt", repo_id="me/case")
    return code


def hangs(arguments: list[str]) -> int:
    time.sleep(10 * SECONDS)
    return 0


def hog(arguments: list[str]) -> int:
    return len(bytearray(2**33)) - 2**33


def raises(arguments: list[str]) -> int:
    raise ValueError("nobody foresaw it")


def unforeseen(arguments: list[str]) -> int:
    print("error: 'x' (unexpected; run it again with -v for the traceback)", file=sys.stderr)
    return 1


def escape(arguments: list[str]) -> int:
    print("error: there is no '\x1b[31mred'", file=sys.stderr)
    return 1


def silent(arguments: list[str]) -> int:
    return 1


def killed(arguments: list[str]) -> int:
    os.kill(os.getpid(), 11)
    return 0


OF_CONVERT = (
    *(faithful, half_an_out, out_without_a_shard, other_weights, other_config, changed_source, lost_file, leak),
    *(written_elsewhere, hangs, hog, raises, unforeseen, escape, silent, killed),
)
OF_PUSH = (faithful, published)


def case_of(planted, arguments: tuple[str, ...], starts: Path, place: Path) -> Case:
    """Return a case in which nothing is mutated."""
    cases.fill(place, starts, "llama")
    if planted is lost_file:
        (place / "work" / "out").mkdir()
        (place / "work" / "out" / "thesis.txt").write_bytes(PRECIOUS)
    out = "out" if arguments[0] == "convert" else None
    return Case(0, arguments[0], place, (), arguments, "llama", out, looks=True)


def _empty(folder: Path) -> Path:
    folder.mkdir()
    return folder


def main() -> None:
    with prepared() as place:
        starts = build_starts(place)
        tried = [(planted, CONVERT) for planted in OF_CONVERT] + [(planted, PUSH) for planted in OF_PUSH]

        def work(worker: int, item) -> list:
            planted, arguments = item
            case = case_of(planted, arguments, starts, place / f"{arguments[0]} {planted.__name__}")
            before = judge.look(case)
            limits = {"seconds": SECONDS} if planted is hangs else {}
            ended, repos = run_case(case, starts, main=planted, **limits)
            return [f"{arguments[0]}: {planted.__name__}", *judge.judge(case, before, ended, repos)]

        for seed in range(SEEDS):
            one, other = (cases.make(seed, starts, _empty(place / f"{seed} {turn}")) for turn in range(2))
            if (one.said, one.arguments) != (other.said, other.arguments):
                raise RuntimeError(f"seed {seed} makes {one.said} and {other.said}")
        print(json.dumps({name: [outcome, reason] for name, outcome, reason in side_by_side(tried, work, 1)}))


if __name__ == "__main__":
    main()
