"""Argument checks whose messages say what was expected and what was passed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np


def check_whole(name: str, value: Any, least: int = 1) -> None:
    """Check that a value is a whole number of at least ``least``.

    Raises
    ------
    ValueError
        If it is not.

    Examples
    --------
    >>> check_whole("steps", 2.5)
    Traceback (most recent call last):
        ...
    ValueError: Argument 'steps' must be a whole number of at least 1, it is 2.5.
    """
    if not isinstance(value, int | np.integer) or value < least:
        raise ValueError(
            f"Argument {name!r} must be a whole number of at least {least}, it is {value}."
        )


def check_positive(
    name: str, value: float, *, or_zero: bool = False, or_infinite: bool = False
) -> None:
    """Check that a number is positive and finite.

    Raises
    ------
    ValueError
        If it is not, apart from zero with ``or_zero`` and infinity with ``or_infinite``.

    Examples
    --------
    >>> check_positive("tol", -1, or_zero=True)
    Traceback (most recent call last):
        ...
    ValueError: Argument 'tol' must be 0 or a positive number, it is -1.
    """
    above = value >= 0 if or_zero else value > 0
    if not above or (value == math.inf and not or_infinite):
        wanted = "0 or a positive number" if or_zero else "a positive number"
        raise ValueError(f"Argument {name!r} must be {wanted}, it is {value}.")


def check_stopping(tol: float, max_iter: int) -> None:
    """Check the stopping criteria of an iteration.

    Raises
    ------
    ValueError
        If an argument is out of range.
    """
    check_positive("tol", tol, or_zero=True)
    check_whole("max_iter", max_iter)
