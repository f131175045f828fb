"""What `make test` leaves to `make test-slow`, and that to `make test-tail`."""

from collections.abc import Iterable

import pytest


def few(values: Iterable, *fast) -> list:
    """Parameters of a test: those in `fast`, and the others, which are slow. A tuple stands for several parameters.

    Raises `ValueError` when one that is to be fast is not among them: nobody would miss it.
    """
    values = list(values)
    if unknown := [value for value in fast if value not in values]:
        raise ValueError(f"{unknown} should be fast, but the parameters are {values}.")
    return [value if value in fast else pytest.param(*_several(value), marks=pytest.mark.slow) for value in values]


def tail(*values) -> list:
    """Parameters of a slow test for which others stand: only `make test-tail` has them."""
    return [pytest.param(*_several(value), marks=[pytest.mark.slow, pytest.mark.tail]) for value in values]


def _several(value) -> tuple:
    return value if isinstance(value, tuple) else (value,)
