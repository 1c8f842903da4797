r"""Which rows have lost digits when they were solved for.

A row that is solved for is a weighted sum of scaled shares, :math:`y = \sum_i w_i s_i`. The error
of a share is about :math:`u |s_i|` with the unit roundoff ``u``, because products and rounding
errors are both sums of terms of random signs. So the error of ``y`` is about

.. math:: u \, e , \qquad e^2 = \sum_i w_i^2 |s_i|^2 .

A plain sum of the row ``b`` itself has an error of about :math:`u |b| |x|`. If ``e`` is much
larger than :math:`|b| |x|`, because the other rows have large entries where ``x`` is large and this
one has not, digits are lost. The row itself is missing, so its size is estimated from below by the
larger of two numbers: ``|y|``, and :math:`t \sum' |x|`, where ``t`` is the row's *typical entry*
(:func:`dask_coded.rounds.scaling.typical_of`) and the sum leaves out the largest sixteenth of the
operand. The first is right unless terms cancel, the second unless the operand is concentrated on a
few columns.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_coded.codes import Code
from dask_coded.rounds.scaling import LARGEST, NO_ENTRY, Exponents
from dask_coded.typing import Bools, Floats

#: A row is doubtful if its error may be this many times the rounding of a plain sum of the row.
LIMIT = 100
# The largest of many rounding errors is about this many times the size of the share. With 4, two of
# 13,680 rounds with lognormal columns had a row beyond the limit and said nothing, with 5 none.
_LARGEST_OF_MANY = 5
_BOUND = (LIMIT / _LARGEST_OF_MANY) ** 2
# Columns of the operand whose sizes differ by less are bounded together.
_ALIKE = 8


class AccuracyWarning(UserWarning):
    """Rows of a result have lost digits, because they were solved for from much larger ones."""


def lose_half(error: float, eps: float) -> bool:
    """Return whether an error, relative to a row, leaves less than half of its digits."""
    return error > math.sqrt(eps)


class NotSolvableError(ArithmeticError):
    """A share is not finite, so that rows of other blocks cannot be solved for."""


class Accuracy:
    """Finds rows that have lost digits in one round.

    Parameters
    ----------
    operand : ndarray, shape (columns,) or (columns, m)
    """

    def __init__(self, operand: npt.NDArray[Any]) -> None:
        self._operand = operand

    @cached_property
    def _sizes(self) -> tuple[Floats, Floats]:
        """A unit for each column of the operand, and in it the sum of the smaller entries."""
        sizes = np.abs(self._operand).astype(np.float64, copy=False)
        # By powers of two, so that squares neither overflow nor vanish.
        exponents = np.frexp(sizes.max(axis=0, initial=0.0))[1]
        unit = np.ldexp(1.0, np.clip(-exponents, -LARGEST, LARGEST))
        kept = len(sizes) - len(sizes) // 16 - 1
        small = np.partition(sizes, kept, axis=0)[:kept] if kept > 0 else sizes[:0]
        # Not zero, so that it can be divided by.
        return unit, np.maximum(small.sum(axis=0) * unit, np.finfo(np.float64).tiny ** 0.25)

    def doubtful(
        self,
        weights: Floats,
        stack: npt.NDArray[Any],
        solved: npt.NDArray[Any],
        typical: Exponents,
        typical_columns: Exponents | None = None,
    ) -> tuple[int, float]:
        """Return how many rows have lost digits, and how much larger the largest error is.

        The second number is the error of a row in units of the rounding error of a plain sum.

        Parameters
        ----------
        weights : ndarray, shape (missing, used)
        stack : ndarray, shape (used, rows, *columns)
            The scaled shares.
        solved : ndarray, shape (missing, rows, *columns)
            ``weights @ stack``.
        typical : ndarray of int16, shape (missing, rows)
            Of the rows that were solved for, see :func:`dask_coded.rounds.scaling.typical_of`.
        typical_columns : ndarray of int16, shape (missing, columns), optional
            The same of the other factor, if the products are those of a pair of matrices.

        Raises
        ------
        NotSolvableError
            If a share is not finite.
        """
        unit, spread = self._sizes
        squares = weights**2
        # First a bound for all these rows at once: two passes over the stack, where an error for
        # each row takes ten. Few rows, if any, have typical entries so small that it matters.
        largest = _largest(stack, unit)
        with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
            error = squares @ np.square(largest)
            if not np.isfinite(error).all():
                raise NotSolvableError
            least = np.log2(error / (_BOUND * spread.min(initial=np.inf) ** 2)) / 2
        least = np.nan_to_num(least, nan=-np.inf)  # of an operand with NaN where no row is
        if typical_columns is not None:
            least = least - typical_columns.min(axis=1, initial=0)
        some = typical < np.ceil(least).clip(-LARGEST, LARGEST).astype(np.int16)[:, None]
        if not some.any():
            return 0, 0.0
        rows = np.flatnonzero(some.any(axis=0))
        floors = _powers(typical[:, rows])
        floors = floors.reshape(*floors.shape, *(1,) * (solved.ndim - 2))
        if typical_columns is not None:
            floors = floors * _powers(typical_columns)[:, None]
        size = np.square(np.maximum(np.abs(solved[:, rows]) * unit, floors * spread))
        error = _combined(squares, np.abs(stack[:, rows]) * unit)
        found = error > _BOUND * size
        if not found.any():
            return 0, 0.0
        with np.errstate(divide="ignore", invalid="ignore"):
            worst = float(np.max(error / size, where=found, initial=0.0))
        count = int(np.count_nonzero(found.reshape(*found.shape[:2], -1).any(axis=2)))
        return count, _LARGEST_OF_MANY * math.sqrt(worst)


def _largest(stack: npt.NDArray[Any], unit: Floats) -> Floats:
    """Return a bound of the sizes in each share, in units: shape (used,)."""
    if stack.dtype.kind == "c" or unit.max(initial=0.0) > _ALIKE * unit.min(initial=np.inf):
        stack, unit = np.abs(stack) * unit, np.ones(())
    flat = stack.reshape(len(stack), -1)
    sizes = np.maximum(flat.max(axis=1, initial=0.0), -flat.min(axis=1, initial=0.0))
    return np.asarray(sizes * unit.max(initial=0.0))


def _combined(squares: Floats, sizes: Floats) -> Floats:
    """Return the squares of errors of weighted sums of shares of these sizes."""
    flat = np.square(sizes).reshape(len(sizes), -1)
    return np.asarray((squares @ flat).reshape(len(squares), *sizes.shape[1:]))


def _powers(typical: Exponents) -> Floats:
    """Return typical entries; infinity for rows whose result is known."""
    return np.where(typical == NO_ENTRY, np.inf, np.ldexp(1.0, np.minimum(typical, 0)))


def doubtful_when_rebuilt(
    code: Code,
    weights: Sequence[tuple[int, float]],
    typical: Sequence[Exponents],
    block: int,
    eps: float,
) -> Bools:
    """Return which rows of a block lose half of their digits when it is made from other pieces.

    What they lose in a product depends on the operand, which is not known here.

    Parameters
    ----------
    code : Code
    weights : sequence of (int, float)
        The pieces from which it is made, and with which weights.
    typical : sequence of ndarray of int16
        Of the rows of each block, see :func:`dask_coded.rounds.scaling.typical_of`.
    block : int
    eps : float
        Distance from 1 to the next number of the dtype.

    Returns
    -------
    ndarray of bool, shape (rows of the block,)
    """
    # With which weight each block enters, and leaves again.
    squares = sum((weight * code.G[piece]) ** 2 for piece, weight in weights)
    own = _powers(typical[block])
    error = np.zeros(len(own))
    for j, square in enumerate(squares):
        part = _powers(typical[j])[: len(error)]
        error[: len(part)] += square * np.where(np.isfinite(part), part, 0) ** 2
    return np.asarray(error * eps > own**2)
