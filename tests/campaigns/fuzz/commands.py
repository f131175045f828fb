"""Runs a case's command as a user would, in a child process."""

import os
import sys
import tempfile
import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from transformers import AutoModelForCausalLM

from hf_hyperconn import load_hc
from hf_hyperconn.conversion import cli
from hf_hyperconn.errors import HyperConnError
from tests.push.conftest import connected

from .cases import Case
from .children import Ended, run
from .hub_process import Running, hub_process
from .starts import ON_THE_HUB

Main = Callable[[list[str]], int]


def run_case(case: Case, starts: Path, main: Main = cli.main, **limits) -> tuple[Ended, dict | None]:
    """Run the command of a case; return its end, and the repos of the Hub afterwards if it pushed.

    main: the command line. limits: as for `run`.
    """
    if case.driver == "load_hc":
        return run_here(case.place, lambda: _load_hc(case, starts), **limits), None
    if case.driver != "push":
        return run_here(case.place, lambda: main(list(case.arguments)), **limits), None
    with hub_process(case.place / "hub", {f"org/{ON_THE_HUB}": starts / "bases" / ON_THE_HUB}) as hub:
        ended = run_here(case.place, lambda: main(list(case.arguments)), hub=hub, **limits)
        return ended, hub.repos()


def run_here(place: Path, work: Callable[[], int], hub: Running | None = None, **limits) -> Ended:
    """Run a command in the folder `work` of a case's place, which holds its home and temporary files, too."""

    def begin() -> int:
        tempfile.tempdir = None  # what this process has chosen
        with ExitStack() as stack:
            if hub is not None:
                stack.enter_context(connected(hub, place / "home"))
            return work()

    environment = {"HOME": str(place / "home"), "TMPDIR": str(place / "tmp")}
    return run(begin, place / "log", folder=place / "work", environment=environment, **limits)


def _load_hc(case: Case, starts: Path) -> int:
    """Call `load_hc` as if it were a command; return 1 for an error that it promises."""
    model = AutoModelForCausalLM.from_pretrained(starts / "bases" / "llama")
    try:
        load_hc(model, case.arguments[0])
    except HyperConnError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        os._exit(1)
    return 0
