"""Printing of the command line: results to stdout, the rest to stderr, even if nobody reads it."""

import os
import re
import sys
from typing import TextIO

from hf_hyperconn.errors import HyperConnError

COLORS = {"error": 31, "warning": 33}  # by the first word of a line: red, yellow
MOST_NAMED = 3  # files that a message names before it counts


def open_streams() -> None:
    """Replace a closed stdout or stderr, so that nothing is printed into the next opened file."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest descriptor that is free
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115


def print_result(text: str, *, as_is: bool = False) -> None:
    """Print a result to stdout, or nowhere if its reader has closed it.

    as_is: whether to escape nothing outside of terminals, for paths that a script reads.

    Raises `HyperConnError` when the result can't be written otherwise.
    """
    try:
        _write(sys.stdout, text if as_is and not sys.stdout.isatty() else printable(text))
    except OSError as error:
        raise HyperConnError(f"can't print the result: {error.strerror}. Print it to somewhere else.") from error


def print_message(text: str) -> None:
    """Print a message to stderr, or nowhere if that fails."""
    try:
        _write(sys.stderr, _colored(printable(text)))
    except OSError:
        _to_nowhere(sys.stderr)


def print_start(command: str, subject: str) -> None:
    """Tell a terminal which command begins, because its imports may take seconds."""
    if sys.stderr.isatty():
        print_message(f"{command:<14}{subject}".rstrip())


def printable(text: str) -> str:
    """Escape invisible characters, which can change other text or drive a terminal; lines stay."""
    return "".join(char if char.isprintable() or char == "\n" else ascii(char)[1:-1] for char in text)


def _colored(text: str) -> str:
    """Color the first word of an error or a warning on a terminal, unless NO_COLOR is set."""
    word = re.match("|".join(COLORS), text)
    if word is None or not sys.stderr.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\033[{COLORS[word[0]]}m{word[0]}\033[0m{text[word.end() :]}"


def name_some(names: tuple[str, ...]) -> str:
    """List the first of some files for people, and count the others."""
    more = len(names) - MOST_NAMED
    return ", ".join(names[:MOST_NAMED]) + (f" and {more} more" if more > 0 else "")


def _write(stream: TextIO, text: str) -> None:
    encoding = stream.encoding or "utf-8"
    shown = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        print(shown, file=stream, flush=True)
    except BrokenPipeError:
        _to_nowhere(stream)


def _to_nowhere(stream: TextIO) -> None:
    """Discard the rest of a stream; else it would be written, and fail, when the process ends."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def written_bytes(count: float) -> str:
    """Write a number of bytes for people."""
    for unit in ("bytes", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.2f} GB"
