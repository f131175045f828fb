"""What goes wrong in a tokenizer, in one line."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from hf_hyperconn.errors import HyperConnError

from .source import Source

FILE = "tokenizer.json"


@contextmanager
def tokenizer_errors(source: Source) -> Iterator[None]:
    """Turn what goes wrong in a tokenizer into a `HyperConnError`; also a panic of Rust, whose report is not shown."""
    try:
        with _without_stderr():
            yield
    except (HyperConnError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        name = FILE if FILE in source.files else "the tokenizer"
        raise HyperConnError(
            f"{name} of {source.name!r} can't read a text ({reason:.300}). Copy the tokenizer's files from its base."
        ) from error


@contextmanager
def _without_stderr() -> Iterator[None]:
    """Within it, what is written to the process's stderr goes nowhere: Rust writes there itself."""
    sys.stderr.flush()
    try:
        kept = os.dup(2)
    except OSError:  # it is closed
        yield
        return
    nowhere = os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    finally:
        sys.stderr.flush()
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
