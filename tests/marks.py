"""Which tests `make test` leaves to `make test-slow`, and that to `make test-tail`."""

from collections.abc import Iterable

import pytest


def few(values: Iterable, *fast, tail: Iterable = ()) -> list:
    """Return parameters of a test: those in `fast`, those in `tail`, and the others, which are slow.

    A tuple stands for several parameters. Raises `ValueError` for one in `fast` or `tail` that is not in `values`,
    whose test nobody would miss.
    """
    values, tail = list(values), list(tail)
    if unknown := [value for value in (*fast, *tail) if value not in values]:
        raise ValueError(f"Marked parameters must be in {values} (got {unknown}).")
    marks = {True: [pytest.mark.slow, pytest.mark.tail], False: [pytest.mark.slow]}
    return [value if value in fast else _marked(value, marks[value in tail]) for value in values]


def tail(*values) -> list:
    """Return parameters of a slow test for which others stand: only `make test-tail` has them."""
    return few(values, tail=values)


def _marked(value, marks: list):
    return pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=marks)
