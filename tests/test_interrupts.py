"""Ctrl-C ends a command in one line wherever it comes, and no thread waits for ever."""

import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress

import pytest

from hf_hyperconn.conversion.cli import main
from hf_hyperconn.conversion.interrupts import holding_interrupts
from hf_hyperconn.errors import VerificationError

from .test_terminal import ENTRY

# Ctrl-C when the main thread has just taken the lock of a future, which the thread that works needs to be done
WITH_A_LOCK_TAKEN = """
import os, signal, sys, threading, time
from hf_hyperconn.conversion import cli, convert

bring, enter = convert.copy_or_link, threading.Condition.__enter__
working, sent = threading.Event(), threading.Event()

def bring_late(*arguments):
    working.set()
    sent.wait()
    return bring(*arguments)

def enter_and_interrupt(condition):
    caller = sys._getframe(1).f_code.co_name, sys._getframe(2).f_code.co_filename
    is_first = caller == ("result", convert.__file__) and not sent.is_set()
    if is_first:
        working.wait()
    entered = enter(condition)
    if is_first:
        sent.set()
        os.kill(os.getpid(), signal.SIGINT)
    return entered

convert.copy_or_link, threading.Condition.__enter__ = bring_late, enter_and_interrupt
raise SystemExit(cli.main(sys.argv[1:]))
"""


def test_ctrl_c_while_it_starts_is_one_line(llama_folder):
    """From its first own line on; before, Python itself is starting."""
    arguments = ["inspect", str(llama_folder)]
    for delay in random.Random(0).choices([i / 1000 for i in range(300)], k=12):
        process = subprocess.Popen(
            [sys.executable, "-c", f"{ENTRY}; print('started', flush=True); raise SystemExit(main())", *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout.readline() == "started\n"
        time.sleep(delay)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
        assert "Traceback" not in errors, delay
        assert process.returncode in (130, 1), errors
        assert len(errors.splitlines()) == 1


@pytest.mark.parametrize(("line", "code"), [("os.kill(os.getpid(), 2)", 130), ("raise ValueError", 1)])
def test_ctrl_c_while_an_import_makes_a_class_is_one_line(line, code):
    """Python 3.11 takes it for a RuntimeError where a class names attributes; another error keeps its traceback."""
    program = f"""
import os
{ENTRY}

class Attribute:
    def __set_name__(self, owner, name):
        {line}

class Finder:
    def find_spec(self, name, *_):
        if name == "hf_hyperconn.conversion.cli":
            type("Class", (), {{"attribute": Attribute()}})

sys.meta_path.insert(0, Finder())
raise SystemExit(main())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == code
    assert (done.stderr == "interrupted\n") == (code == 130)


def test_ctrl_c_while_arguments_are_parsed(monkeypatch, capsys):
    from hf_hyperconn.conversion import cli

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_parsers", interrupt)
    assert main(["convert"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


@pytest.mark.parametrize(
    ("arguments", "goes_on"),
    [
        (["convert", "llama"], True),
        (["convert", "llama", "--dry-run"], False),
        (["push", "llama-hc", "me/llama-hc"], True),
        (["push", "llama-hc", "me/llama-hc", "--dry-run"], False),
        (["verify", "llama-hc"], False),
        (["demo"], False),
    ],
)
def test_only_a_command_that_goes_on_says_so(arguments, goes_on, monkeypatch, capsys):
    from hf_hyperconn.conversion import cli, demo

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    for module, name in ((cli, "plan_conversion"), (cli, "plan_push"), (cli, "verify_checkpoint"), (demo, "run_demo")):
        monkeypatch.setattr(module, name, interrupt)
    assert main(arguments) == 130
    assert capsys.readouterr().err.strip() == "interrupted" + goes_on * "; run the same command again to continue"


def test_an_interrupt_while_an_object_is_finalised_is_heard(monkeypatch, capsys):
    from hf_hyperconn.conversion import cli

    class Finalised:
        def __del__(self):
            raise KeyboardInterrupt

    def run(*args):
        Finalised()
        time.sleep(10)

    monkeypatch.setattr(cli, "inspect_checkpoint", run)
    assert cli.main(["inspect", "anything"]) == 130
    assert capsys.readouterr().err == "interrupted\n"


def test_an_interrupt_that_others_swallow_is_heard(monkeypatch, capsys):
    from hf_hyperconn.conversion import cli

    def run(*args):
        with suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise VerificationError("a package can't be imported")

    monkeypatch.setattr(cli, "inspect_checkpoint", run)
    assert cli.main(["inspect", "anything"]) == 130
    assert capsys.readouterr().err == "interrupted\n"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.slow
def test_ctrl_c_with_a_lock_taken_does_not_hang(llama_folder, tmp_path):
    arguments = ["convert", str(llama_folder), str(tmp_path / "out"), "--verify", "structure", "-q"]
    done = subprocess.run(
        [sys.executable, "-c", WITH_A_LOCK_TAKEN, *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 130
    assert done.stderr.endswith("interrupted; run the same command again to continue\n")
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()
    assert main(arguments) == 0


def test_ctrl_c_is_held_and_raised_at_the_end():
    def work():
        with holding_interrupts() as interrupted:
            assert not interrupted()
            signal.raise_signal(signal.SIGINT)
            done.append(interrupted())

    done = []
    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == [True]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_ctrl_c_replaces_the_error_that_it_makes():
    def work():
        with holding_interrupts() as interrupted:
            signal.raise_signal(signal.SIGINT)
            if interrupted():
                raise InterruptedError("stopped")

    with pytest.raises(KeyboardInterrupt):
        work()


def test_a_second_ctrl_c_is_raised_at_once():
    def work():
        with holding_interrupts():
            signal.raise_signal(signal.SIGINT)
            done.append("first")
            signal.raise_signal(signal.SIGINT)
            done.append("second")

    done = []
    with pytest.raises(KeyboardInterrupt):
        work()
    assert done == ["first"]


def test_who_hears_ctrl_c_in_a_way_of_their_own_still_does():
    heard = []
    before = signal.signal(signal.SIGINT, lambda number, frame: heard.append(number))
    try:
        with holding_interrupts() as interrupted:
            signal.raise_signal(signal.SIGINT)
        assert heard == [signal.SIGINT]
        assert not interrupted()
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_change_no_handler():
    def look():
        with holding_interrupts():
            found.append(signal.getsignal(signal.SIGINT))

    found = []
    before = signal.getsignal(signal.SIGINT)
    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [before]
