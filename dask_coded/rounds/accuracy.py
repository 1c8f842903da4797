r"""Which rows have lost digits when they were recovered.

A row that is recovered is a weighted sum of scaled shares, :math:`y = \sum_i w_i s_i`. The error
of a share is about :math:`u |s_i|` with the unit roundoff ``u``, because products and rounding
errors are both sums of terms of random signs. Its terms may cancel, but a parity piece was rounded
when it was stored, and a piece that was made from others has lost more. So the error is at least
:math:`u \, r_i h` with :math:`h^2 = \sum_j c_j^2 |x_j|^2`. Here :math:`c_j` is the root mean square
of column ``j`` of the scaled rows, and :math:`r_i` the norm of the piece's row of the generator,
if it is parity, plus the growth of its errors.

And no number is smaller than the least one of the dtype, :math:`d`. So products of entries have
errors of about :math:`d`, the sum of ``n`` of them one of :math:`d \sqrt n`, and the scaled share
one of :math:`u \, v_i` with :math:`v_i = d \sqrt n \, 2^{-e_i} / u`. Here :math:`e_i` is the
exponent of the row if the piece is a block, otherwise zero. So the error of ``y`` is about

.. math:: u \, e , \qquad e^2 = \sum_i w_i^2 \max(|s_i|, r_i h, v_i)^2 .

A row of a block that was made from other pieces has an error of :math:`u \, r_i h` even if it comes
back itself.

A plain sum of the row ``b`` itself has an error of about :math:`u |b| |x|`. If ``e`` is much
larger than :math:`|b| |x|`, because the other rows have large entries where ``x`` is large and this
one has not, digits are lost. The row itself is missing, so its size is estimated from below by the
larger of two numbers: ``|y|``, and :math:`t \sum' |x|`, where ``t`` is the row's *typical entry*
(:func:`dask_coded.rounds.scaling.typical_of`) and the sum leaves out the largest sixteenth of the
operand. The first is right unless terms cancel, the second unless the operand is concentrated on a
few columns, or on such in which the row has no entries. So the second is at most
:math:`\sum_j c_{bj} |x_j|`, where :math:`c_{bj}` is the root mean square of column ``j`` in the
block of the row. Of two rows of one block, one with entries where the operand is large and one
without, this does not tell the second from the first. A plain sum has its own error :math:`v`, by
the exponent of the row.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_coded.codes import Code
from dask_coded.rounds.scaling import LARGEST, NO_ENTRY, Exponents, Scales
from dask_coded.typing import Bools, Floats, Ints

#: A row is doubtful if its error may be this many times the rounding of a plain sum of the row.
LIMIT = 100
# The largest of many rounding errors is about this many times the size of the share. With 4, two of
# 13,680 rounds with lognormal columns had a row beyond the limit and said nothing, with 5 none.
_LARGEST_OF_MANY = 5
_BOUND = (LIMIT / _LARGEST_OF_MANY) ** 2
# Columns of the operand whose sizes differ by less are bounded together.
_ALIKE = 8
# An error as large, where the operand is 1, is beyond all limits, and its square does not overflow.
_HUGE = 2.0**256
# A margin, because one bound stands for all rows: what vanishes is left out only if an error eight
# times as large would not matter either. Errors are compared by their squares.
_MATTERS = 64


class AccuracyWarning(UserWarning):
    """Rows of a result have lost digits, because they were recovered from much larger ones."""


def lose_half(error: float, eps: float) -> bool:
    """Return whether an error, relative to a row, leaves less than half of its digits."""
    return error > math.sqrt(eps)


class NotSolvableError(ArithmeticError):
    """Rows cannot be recovered, because shares of other blocks are not finite or too small."""


class Accuracy:
    """Finds rows that have lost digits in one round.

    Parameters
    ----------
    operand : ndarray, shape (columns,) or (columns, m)
    scales : Scales
        With typical entries.
    coarser : float
        How many times larger the rounding of the stored pieces is than that of the result.
    dtype : dtype
        Of the result.
    """

    def __init__(
        self,
        operand: npt.NDArray[Any],
        scales: Scales,
        coarser: float = 1.0,
        dtype: npt.DTypeLike = np.float64,
    ) -> None:
        self._operand = operand
        self._scales = scales
        self._coarser = coarser
        self._lowest: dict[int, int] = {}
        # Shares of half precision are computed in single precision.
        info, kept = np.finfo(dtype), np.finfo(np.result_type(np.dtype(dtype), np.float32))
        least = float(kept.smallest_normal) * float(kept.eps)
        # What vanishes from a share that is not scaled, in units of rounding.
        self._vanishing = math.sqrt(len(operand)) * least / (float(info.eps) / 2)

    @cached_property
    def _absolute(self) -> Floats:
        """The absolute values of the operand."""
        # In floats, because the smallest integer of a dtype has no absolute value in that dtype.
        wide = self._operand.astype(np.result_type(self._operand, np.float64), copy=False)
        return np.asarray(np.abs(wide), dtype=np.float64)

    @cached_property
    def _sizes(self) -> tuple[Floats, Floats]:
        """A unit for each column of the operand, and in it the sum of the smaller entries."""
        sizes = self._absolute
        # By powers of two, so that squares neither overflow nor vanish.
        exponents = np.frexp(sizes.max(axis=0, initial=0.0))[1]
        unit = np.ldexp(1.0, np.minimum(-exponents, LARGEST))
        kept = len(sizes) - len(sizes) // 16 - 1
        small = np.partition(sizes, kept, axis=0)[:kept] if kept > 0 else sizes[:0]
        # Not zero, so that it can be divided by.
        return unit, np.maximum(small.sum(axis=0) * unit, np.finfo(np.float64).tiny ** 0.25)

    @cached_property
    def _reached(self) -> Floats:
        """The unit of each column of the operand; zero where all products are zero, exactly."""
        known = self._scales.sizes is not None
        some = self._stored if known else self._absolute.max(axis=0, initial=0.0)
        return np.where(some > 0, self._sizes[0], 0.0)

    @cached_property
    def _stored(self) -> Floats:
        """How large products of scaled rows may be before terms cancel, in the operand's unit."""
        if self._scales.sizes is None:
            return np.zeros(self._operand.shape[1:])
        squares = np.square(self._scales.sizes, dtype=np.float64).mean(axis=0)
        with np.errstate(invalid="ignore", over="ignore"):
            sizes = self._absolute * self._sizes[0]
            np.square(sizes, out=sizes)
        return np.asarray(np.sqrt(_product(squares, sizes)))

    @cached_property
    def _most(self) -> Floats | None:
        """The size of a usual row of each block, which no floor exceeds, in the operand's unit."""
        if self._scales.sizes is None or len(self._scales.sizes) != len(self._scales.rows):
            return None
        with np.errstate(invalid="ignore", over="ignore"):
            return _product(self._scales.sizes, self._absolute * self._sizes[0])

    @cached_property
    def _smallest(self) -> Floats:
        """The smallest entry of the operand that is not zero, in its unit."""
        sizes = self._absolute * self._sizes[0]
        found = np.min(sizes, axis=0, initial=1.0, where=sizes > 0)
        return np.asarray(found)

    @cached_property
    def _common(self) -> tuple[float, float]:
        """The largest unit, or infinity if units differ much; the least square of an error."""
        unit, spread = self._sizes
        if unit.ndim == 0:
            return float(unit), _BOUND * float(spread) ** 2
        largest = float(unit.max(initial=0.0))
        alike = largest <= _ALIKE * unit.min(initial=np.inf)
        return largest if alike else math.inf, _BOUND * float(spread.min(initial=np.inf)) ** 2

    def doubtful(
        self,
        missing: Sequence[int],
        weights: Floats,
        start: int,
        stack: npt.NDArray[Any],
        solved: npt.NDArray[Any],
        growth: Floats,
        blocks: Ints,
        spreads: bool = False,
    ) -> tuple[int, float]:
        """Return how many rows have lost digits, and how much larger the largest error is.

        The second number is the error of a row in units of the rounding error of a plain sum.

        Parameters
        ----------
        missing : sequence of int
            Blocks.
        weights : ndarray, shape (missing, used)
        start : int
            The first of these rows in each block.
        stack : ndarray, shape (used, rows, *columns)
            The scaled shares.
        solved : ndarray, shape (missing, rows, *columns)
            ``weights @ stack``.
        growth : ndarray, shape (used,)
            How large the errors of the pieces are, in units of the rounding of a scaled row.
        blocks : ndarray of int, shape (used,)
            The blocks that the pieces equal, -1 for parity.
        spreads : bool
            Whether rows are also counted that have lost digits because shares are too small.

        Raises
        ------
        NotSolvableError
            If a share is not finite, or so small that other rows lose digits, unless these count.
        """
        squares, growth = weights * weights, self._coarser * growth
        # What comes from stored blocks is as accurate as the result, but not parity.
        coarse = np.where(growth > 0, self._coarser, 1.0)
        found = self._least(missing, squares, stack, growth, coarse, blocks)
        if found is None:
            return 0, 0.0
        least, vanishes = found
        typical = self._typical(missing, start, solved.shape[1])
        rows = np.flatnonzero((typical < least[:, None]).any(axis=0))
        if not len(rows):
            return 0, 0.0
        unit, spread = self._sizes
        floors = _powers(typical[:, rows])
        floors = floors.reshape(*floors.shape, *(1,) * (solved.ndim - 2))
        if self._scales.columns:
            columns = [self._scales.typical_columns[j] for j in missing]
            floors = floors * _powers(_padded(columns, solved.shape[2]))[:, None]
        floors = floors * spread
        if self._most is not None:
            most = self._most[list(missing)][:, None]
            floors = np.where(np.isfinite(floors), np.minimum(floors, most), floors)
        if vanishes:
            across = [self._scales.columns[j] for j in missing] if self._scales.columns else []
            floors = np.maximum(floors, self._vanished(missing, start, rows, solved.shape, across))
        size = np.square(np.maximum(np.abs(solved[:, rows]) * unit, floors))
        growth, coarse = (v.reshape(-1, *(1,) * (stack.ndim - 1)) for v in (growth, coarse))
        shares = np.maximum(np.abs(stack[:, rows]) * unit * coarse, growth * self._stored)

        def lost(shares: Floats) -> tuple[int, float]:
            error = (squares @ np.square(shares).reshape(len(stack), -1)).reshape(size.shape)
            return _beyond(error, size, _BOUND)

        count, worst = lost(shares)
        if vanishes:
            vanished = self._vanished(blocks.tolist(), start, rows, stack.shape)
            all_lost = lost(np.maximum(shares, vanished))
            if all_lost[0] > count and not spreads:
                raise NotSolvableError
            return all_lost
        return count, worst

    def shaken(
        self, block: int, start: int, rows: npt.NDArray[Any], growth: float, eps: float
    ) -> tuple[int, float]:
        """Return what :meth:`doubtful` does, of rows of a block that was made from other pieces.

        A row counts if it has lost half of its digits. A result of zero looks like one whose digits
        are all lost. So a row is taken to be at least its typical entry times the operand's
        smallest one.

        Parameters
        ----------
        block, start : int
        rows : ndarray, shape (rows, *columns)
            Scaled.
        growth : float
            Of the block's piece.
        eps : float
            Distance from 1 to the next number of the dtype.
        """
        if self._lowest_of(block) == NO_ENTRY:
            return 0, 0.0
        unit, spread = self._sizes
        spread = np.maximum(spread, self._smallest)
        growth *= self._coarser
        bound = (2 / math.sqrt(eps) / _LARGEST_OF_MANY) ** 2
        largest = float(self._stored.max(initial=0.0)) * growth
        least = 2.0 ** self._lowest_of(block) * float(np.min(spread, initial=math.inf))
        most = np.inf if self._most is None else self._most[block]
        if largest**2 <= bound * min(least, float(np.min(most, initial=math.inf))) ** 2:
            return 0, 0.0
        floors = _powers(self._typical([block], start, len(rows))[0])
        floors = floors.reshape(-1, *(1,) * (rows.ndim - 1)) * spread
        floors = np.where(np.isfinite(floors), np.minimum(floors, most), floors)
        size = np.square(np.maximum(np.abs(rows) * unit, floors))
        error = np.broadcast_to(np.square(growth * self._stored), size.shape)
        return _beyond(error[None], size[None], bound)

    def spoilt(self, missing: Sequence[int], start: int, solved: npt.NDArray[Any]) -> int:
        """Return how many rows with entries are lost, because a share was not finite."""
        lost = ~np.isfinite(solved).reshape(*solved.shape[:2], -1).all(axis=2)
        typical = self._typical(missing, start, solved.shape[1])
        return int(np.count_nonzero(lost & (typical != NO_ENTRY)))

    def _least(
        self,
        missing: Sequence[int],
        squares: Floats,
        stack: npt.NDArray[Any],
        growth: Floats,
        coarse: Floats,
        blocks: Ints,
    ) -> tuple[Floats, bool] | None:
        """Return from which typical entry on rows of each block are right; None if all are.

        Also whether it matters what vanishes from shares.

        By one bound for all these rows: it takes two passes over the stack, where an error for each
        row takes ten. Few rows, if any, have typical entries so small that it matters.
        """
        unit = self._common[0]
        stored = self._stored
        if stack.dtype.kind == "c" or unit == math.inf:
            stack, unit = np.abs(stack) * self._sizes[0], 1.0
        else:
            stored = stored * (unit / self._sizes[0])
        flat = stack.reshape(len(stack), -1)
        largest = np.maximum(flat.max(axis=1, initial=0.0), -flat.min(axis=1, initial=0.0)) * unit
        largest = np.maximum(largest * coarse, growth * float(stored.max(initial=0.0)))
        # The smallest row of any block stands for all.
        reach = np.where(blocks < 0, 1.0, 2.0**-self._scales.lowest)
        top = self._vanishing * float(np.max(self._reached, initial=0.0))
        with np.errstate(over="ignore"):
            errors = (squares @ (largest * largest)).tolist()
            vanished = (squares @ np.square(np.minimum(reach * top, _HUGE))).tolist()
        if not all(map(math.isfinite, errors)):
            raise NotSolvableError
        least = [
            self._needed(block, error + more)
            for block, error, more in zip(missing, errors, vanished, strict=True)
        ]
        if all(own <= self._lowest_of(j) for own, j in zip(least, missing, strict=True)):
            return None
        vanishes = any(
            self._needed(block, more * _MATTERS) > self._lowest_of(block)
            for block, more in zip(missing, vanished, strict=True)
        )
        return np.asarray(least), vanishes

    def _needed(self, block: int, error: float) -> float:
        """Return from which typical entry on rows of a block are right with the square of an error.

        Called for few numbers, so that plain Python takes less time than NumPy.
        """
        # An operand may have NaN where no row has entries.
        ratio = error / self._common[1]
        own = math.log2(ratio) / 2 if ratio > 0 else -math.inf
        if self._scales.columns:
            own -= int(self._scales.typical_columns[block].min(initial=0))
        if self._most is not None:
            most = float(np.min(self._most[block], initial=math.inf))
            own = math.inf if error > _BOUND * most**2 else own
        return own

    def _vanished(
        self,
        blocks: Sequence[int],
        start: int,
        rows: Ints,
        shape: tuple[int, ...],
        across: Sequence[Exponents] = (),
    ) -> Floats:
        """Return what vanishes from scaled shares, in units of rounding and of the operand.

        Parameters
        ----------
        blocks : sequence of int
            -1 for the rows of parity pieces.
        start : int
        rows : ndarray of int
            Counted from row ``start`` on.
        shape : tuple of int
            Of the products: ``(blocks, all rows, *columns)``.
        across : sequence of ndarray of int16
            The exponents of the columns of each block, if these are scaled.
        """
        count = shape[1]
        parity = np.zeros(count, np.int16)
        found = [self._scales.rows[j][start : start + count] if j >= 0 else parity for j in blocks]
        exponents = _padded(found, count)[:, rows].astype(np.int32)
        exponents = exponents.reshape(*exponents.shape, *(1,) * (len(shape) - 2))
        if across:
            exponents = exponents + _padded(across, shape[2])[:, None]
        with np.errstate(over="ignore"):
            # Zero for rows that are not finite, which parity does not have.
            vanished = np.ldexp(self._vanishing, -exponents) * self._reached
        return np.asarray(np.minimum(vanished, _HUGE))

    def _lowest_of(self, block: int) -> int:
        """Return the smallest typical entry of a block."""
        if block not in self._lowest:
            self._lowest[block] = int(self._scales.typical[block].min(initial=NO_ENTRY))
        return self._lowest[block]

    def _typical(self, missing: Sequence[int], start: int, count: int) -> Exponents:
        return _padded([self._scales.typical[j][start : start + count] for j in missing], count)


def _product(sizes: Floats, operand: Floats) -> Floats:
    """Multiply sizes of columns by an operand, which may be anything where no row has entries."""
    with np.errstate(invalid="ignore", over="ignore"):
        found = np.asarray(sizes @ operand)
    if not np.isfinite(found).all():
        found = np.asarray(sizes @ np.where(np.isfinite(operand), operand, 0))
    return found


def _beyond(error: Floats, size: Floats, bound: float) -> tuple[int, float]:
    """Return how many rows have lost digits, and the largest error; all are given as squares."""
    found = error > bound * size
    if not found.any():
        return 0, 0.0
    with np.errstate(divide="ignore", invalid="ignore"):
        worst = float(np.max(error / size, where=found, initial=0.0))
    count = int(np.count_nonzero(found.reshape(*found.shape[:2], -1).any(axis=2)))
    return count, _LARGEST_OF_MANY * math.sqrt(worst)


def _padded(typical: Sequence[Exponents], length: int) -> Exponents:
    """Return typical entries of several blocks; there are none where a block is shorter."""
    out = np.full((len(typical), length), NO_ENTRY)
    for row, found in zip(out, typical, strict=True):
        row[: len(found)] = found
    return out


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
