"""Ctrl-C where Python would lose it, or where it would break what threads share."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer, current_thread, main_thread


@contextmanager
def hearing_interrupts() -> Iterator[None]:
    """Within it, Ctrl-C is heard also when it comes while Python finalises an object, which would only report it."""

    def report(unraisable) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # a little later: now it would be raised in here
            Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            before(unraisable)

    before, sys.unraisablehook = sys.unraisablehook, report
    try:
        yield
    finally:
        sys.unraisablehook = before


@contextmanager
def holding_interrupts() -> Iterator[Callable[[], bool]]:
    """Within it, Ctrl-C is noted and raised at the end; a second one is raised at once.

    For work on several threads: raised while this one takes a lock, it leaves the lock taken, and the others wait for
    it for ever. Yields what tells whether it came. Where the program hears Ctrl-C in a way of its own, or on a thread
    that can't, nothing is changed.
    """
    if current_thread() is not main_thread() or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    came = False

    def note(number, frame) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, signal.default_int_handler)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if came:
            raise KeyboardInterrupt
