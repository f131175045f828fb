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
    """Tell whether Ctrl-C raises KeyboardInterrupt on this thread; else the program handles it."""
    handlers = (signal.default_int_handler, _hear)
    return current_thread() is main_thread() and signal.getsignal(signal.SIGINT) in handlers


@contextmanager
def hearing_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt for Ctrl-C even where it would be lost.

    Python only reports it while it finalizes an object. Code of other packages may take it for another error, such as
    of an optional import, and then fail.
    """
    global _heard

    def report(unraisable) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            # a little later: now it would be raised in here
            Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
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

    This is for work on several threads. An error raised while this thread takes a lock leaves the lock taken. Other
    threads then wait forever. Where the program handles Ctrl-C, and on other threads, nothing changes.

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
