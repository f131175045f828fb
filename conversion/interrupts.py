"""Ctrl-C where Python would lose it, or where it would break the state of threads."""

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from threading import Timer, current_thread, main_thread

_heard = False


def _hear(number, frame) -> None:
    global _heard
    _heard = True
    signal.default_int_handler(number, frame)


def _is_ours_to_hear() -> bool:
    """Tell whether Ctrl-C is raised as KeyboardInterrupt on this thread; else the program hears it in its own way."""
    handlers = (signal.default_int_handler, _hear)
    return current_thread() is main_thread() and signal.getsignal(signal.SIGINT) in handlers


@contextmanager
def hearing_interrupts() -> Iterator[None]:
    """Hear Ctrl-C also where it would be lost.

    It would be lost while Python finalizes an object, which only reports it. It would also be lost in other packages'
    code that takes it for another error, as of an optional import, and then fails.
    """
    global _heard

    def report(unraisable) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # a little later: now it would be raised in here
            Timer(0.01, os.kill, (os.getpid(), signal.SIGINT)).start()
        else:
            before(unraisable)

    _heard, is_ours = False, _is_ours_to_hear()
    before, sys.unraisablehook = sys.unraisablehook, report
    handler = signal.signal(signal.SIGINT, _hear) if is_ours else None
    try:
        yield
    except Exception as error:
        if _heard:
            raise KeyboardInterrupt from error
        raise
    finally:
        sys.unraisablehook = before
        if is_ours:
            signal.signal(signal.SIGINT, handler)


@contextmanager
def holding_interrupts() -> Iterator[Callable[[], bool]]:
    """Hold Ctrl-C, and raise it at the end; a second one is raised at once.

    This is for work on several threads: raised while this thread takes a lock, Ctrl-C leaves the lock taken, and other
    threads wait forever. Nothing is changed where the program hears Ctrl-C in its own way, or on other threads.

    Yields a function that tells whether Ctrl-C came.
    """
    if not _is_ours_to_hear():
        yield lambda: False
        return
    came = False

    def note(number, frame) -> None:
        nonlocal came
        came = True
        signal.signal(signal.SIGINT, before)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: came
    finally:
        signal.signal(signal.SIGINT, before)
        if came:
            raise KeyboardInterrupt
