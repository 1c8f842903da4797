r"""Verified shares: Freivalds' method [1]_ in floating point.

Whether ``y`` is ``P @ x`` can be checked without computing it again: ``w @ y`` must equal
``(w @ P) @ x`` for a random ``w``, and ``w @ P`` is computed once. Here it is kept for each stripe
``t`` of each block, as one half of a *check*: the *sums* of ``columns`` numbers

.. math:: c_{jt} = \sum_{r \in t} w_r B_j[r]

where ``B_j`` is the block with its rows scaled by powers of two (:mod:`dask_coded.rounds.scaling`),
so that an error in a small row counts as much as one in a large row. Pieces are combinations of
blocks, so the check of piece ``i`` is :math:`\sum_j G_{ij} c_{jt}`, and a piece that was made or
rebuilt wrongly is found too.

The other half are the *sizes* of the columns,

.. math:: \sigma_{jt} = \Big( \sum_{r \in t} w_r^2 |B_j[r]|^2 \Big)^{1/2} , \qquad
   \sigma_{it} \le \sum_j |G_{ij}| \sigma_{jt} .

A share ``y`` of the stripes ``a … b - 1`` is accepted if

.. math::

   \Big| \sum_r w_r y_r - \sum_{t=a}^{b-1} c_{it} x \Big|
   \le K \Big( \sum_{t=a}^{b-1} e_t^2 \Big)^{1/2} , \qquad e_t = \gamma \, u \, \sigma_{it} |x|

with the unit roundoff ``u``. The rounding error of a product of ``n`` terms is at most ``n u``
times ``|B_r| |x|``, and in practice ``4 sqrt(n) u`` times it [2]_. Sums of equal numbers, which are
rounded in one direction, are covered by ``n / 16``, so :math:`\gamma = 4 \sqrt n + n / 16`. The
signs of ``w`` are random, so that the errors of the rows add up to more than ``K`` times
:math:`\gamma u (\sum_r w_r^2 (|B_r| |x|)^2)^{1/2}` with probability below :math:`2 \exp(-K^2 / 2)`
(Hoeffding), 3e-14 with ``K = 8``. By the triangle inequality, applied to the columns, this root is
at most :math:`\sigma |x|`. By that of Cauchy and Schwarz, :math:`\sigma |x|` is at most
``norm(w * B) * norm(x)``, which needs no sizes of columns. But it would count large entries where
``x`` is small, so that next to one heavy column that ``x`` does not touch any share would pass.

The sums over rows are rounded too. They are summed up in blocks of ``b`` rows and then pairwise. A
sum of ``b`` terms of random sign and of size ``s`` has partial sums of size ``sqrt(b) s``, so its
error is that of terms with errors of ``sqrt(b) u s`` each: :math:`\sqrt b \, u' \sigma_{it} |x|`
is added to :math:`e_t`, with the unit roundoff ``u'`` of the sums, which are in double precision.
All these errors are relative to the entries of one column, and so are those of parity, which is
rounded when it is stored, unless they are smaller than the smallest number ``s`` of the precision:
:math:`s |x|_1` times the weights is added to :math:`e_t` for each time that entries are rounded.

References
----------
.. [1] R. Freivalds, "Probabilistic machines can use less running time", IFIP Congress 1977.
.. [2] N. J. Higham, T. Mary, "A new approach to probabilistic rounding error analysis", SIAM
   Journal on Scientific Computing 41 (5), 2019, theorem 3.1.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from dask_coded.codes import Code
from dask_coded.rounds.decode import Geometry
from dask_coded.rounds.layout import StripeRange
from dask_coded.rounds.scaling import LARGEST, NOT_FINITE, Exponents, scaled
from dask_coded.typing import Floats

# Standard deviations of the sum of rounding errors that are accepted.
_MARGIN = 8.0
# Rows of which a weighted sum is taken at once.
_BLOCK = 256
# Parity is rounded when it is summed up and when it is stored.
_STORED = 2.0
# By which entries are multiplied before they are squared. They are at most 8, so that the squares
# of 2**57 rows do not overflow; and they vanish only where double precision ends as well.
_LIFT = 2.0**480
# Weights of stored rows are multiplied by this before they are summed up: they are up to 2**1021.
_UNIT = 2.0**-64


def random_weights(seed: str, rows: int) -> Floats:
    """Return the weight of each row of a piece: of random sign, between 1/2 and 1."""
    rng = np.random.default_rng(list(seed.encode()))
    return np.asarray(rng.uniform(0.5, 1.0, rows) * rng.choice([-1.0, 1.0], rows))


def empty_check(stripes: int, columns: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return the check of a block without rows: shape (stripes, 2 * columns).

    The first half of the columns is for :func:`sums_of`, the second for :func:`sizes_of`.
    """
    return np.zeros((stripes, 2 * columns), np.result_type(dtype, np.float64))


def sums_of(check: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the weighted sums of the rows of each stripe, shape (stripes, columns)."""
    return check[:, : check.shape[1] // 2]


def sizes_of(check: npt.NDArray[Any]) -> Floats:
    """Return the sizes of the columns in each stripe, shape (stripes, columns)."""
    return check[:, check.shape[1] // 2 :].real


def add_rows(
    check: npt.NDArray[Any],
    weights: Floats,
    edges: npt.NDArray[np.intp],
    first: int,
    rows: npt.NDArray[Any],
) -> None:
    """Add scaled rows of a block, from row ``first`` on, to its check.

    Parameters
    ----------
    check : ndarray
        From :func:`empty_check`.
    weights : ndarray
        From :func:`random_weights`.
    edges : ndarray of int, shape (stripes + 1,)
        The first row of each stripe, and the end.
    first : int
    rows : ndarray, shape (rows, columns)
    """
    last = first + len(rows)
    sums, sizes = sums_of(check), sizes_of(check)
    stripe = max(int(np.searchsorted(edges, first, side="right")) - 1, 0)
    for t in range(stripe, len(check)):
        a, b = max(int(edges[t]), first), min(int(edges[t + 1]), last)
        if a >= last:
            break
        sums[t] += _weighted_sum(weights[a:b], rows[a - first : b - first])
        sizes[t] = np.hypot(sizes[t], _column_sizes(weights[a:b], rows[a - first : b - first]))


def size_bounds(weights: Floats, edges: npt.NDArray[np.intp], exponents: Exponents) -> Floats:
    """Return what the sizes of columns in each stripe of a block are at most: shape (stripes,).

    Entries of scaled rows are at most 1, and those with the largest exponent at most 8. Real and
    imaginary parts count for themselves.
    """
    finite = exponents != NOT_FINITE
    largest = np.where(exponents == LARGEST, 8.0, 1.0)
    terms = np.where(finite, (weights[: len(exponents)] * largest) ** 2, 0.0)
    ends = np.minimum(edges, len(exponents))
    sums = np.diff(np.concatenate([[0.0], np.cumsum(terms)])[ends])
    # Sums of the other order are rounded otherwise.
    return np.asarray(np.sqrt(2.0 * np.maximum(sums, 0.0)) * (1 + 1e-6))


def is_possible(check: Any, bounds: Floats, columns: int) -> bool:
    """Return whether an array can be the check of a block with these :func:`size_bounds`.

    A check with infinity, or with too large sizes, would agree with any share.
    """
    if not (
        isinstance(check, np.ndarray)
        and check.shape == (len(bounds), 2 * columns)
        and check.dtype.kind in "fc"
        and np.isfinite(check).all()
    ):
        return False
    sizes = sizes_of(check)
    return bool((sizes >= 0).all() and (sizes <= bounds[:, None]).all())


def check_error(
    growth: float, dtype: npt.DTypeLike, own: Floats, pieces: Floats, bounds: Floats
) -> Floats:
    """Return by how much two checks of one block may differ, shape (stripes, columns).

    Parameters
    ----------
    growth : float
        Roundings of rows in the precision of the pieces, in both together.
    dtype : dtype
        Of the pieces.
    own, pieces : ndarray, shape (stripes, columns)
        Sizes of the block and, for what was rounded, of the largest piece.
    bounds : ndarray, shape (stripes,)
        From :func:`size_bounds`.
    """
    info, double = np.finfo(np.dtype(dtype)), np.finfo(np.float64)
    error = math.sqrt(_BLOCK) * float(double.eps) * own + growth * float(info.eps) / 2 * pieces
    vanishing = growth * _smallest(info) + math.sqrt(_BLOCK) * _smallest(double)
    return np.asarray(_MARGIN * (error + vanishing * bounds[:, None]))


def _weighted_sum(weights: Floats, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return ``weights @ rows``, with an error that grows with the root of the rows.

    Otherwise the error would grow with the rows, and that of tall matrices would exceed the limit.
    """
    whole = len(rows) // _BLOCK * _BLOCK
    total = weights[whole:] @ rows[whole:]
    if whole:
        count = whole // _BLOCK  # not -1, because there may be no columns
        blocks = rows[:whole].reshape(count, _BLOCK, rows.shape[1])
        sums = (weights[:whole].reshape(count, 1, _BLOCK) @ blocks)[:, 0]
        # NumPy sums up pairwise along contiguous axes only.
        total = total + np.ascontiguousarray(sums.T).sum(axis=1)
    return np.asarray(total)


def _column_sizes(weights: Floats, rows: npt.NDArray[Any]) -> Floats:
    """Return the 2-norm of each column of ``weights[:, None] * rows``, which are at most 8.

    Squares of entries below 1e-154 would vanish, so these are multiplied by a power of two before.
    """
    columns = rows.shape[1]
    if rows.dtype.kind == "c":
        rows = np.ascontiguousarray(rows).view(rows.real.dtype)
    total = np.zeros(rows.shape[1])
    factors = (weights * _LIFT)[:, None]
    for first in range(0, len(rows), _BLOCK):
        part = rows[first : first + _BLOCK] * factors[first : first + _BLOCK]
        total += np.einsum("ij,ij->j", part, part)
    return np.asarray(np.sqrt(total.reshape(columns, -1).sum(axis=1)) / _LIFT)


class Verification:
    """What the shares of an array are checked by; :meth:`verifier` makes it ready for a round.

    Parameters
    ----------
    code : Code
    geometry : Geometry
    exponents : sequence of ndarray
        By which the rows of each block are scaled.
    weights : ndarray, shape (rows of the longest piece,)
        From :func:`random_weights`.
    checks : sequence of ndarray, each of shape (stripes, 2 * columns)
        One for each block.
    dtype : dtype
        Of the pieces.
    """

    def __init__(
        self,
        code: Code,
        geometry: Geometry,
        exponents: Sequence[Exponents],
        weights: Floats,
        checks: Sequence[npt.NDArray[Any]],
        dtype: npt.DTypeLike,
    ) -> None:
        self.code, self.dtype = code, np.dtype(dtype)
        self.block_of: list[int] = code.block_of.tolist()
        self.edges = [geometry.edges(g).tolist() for g in range(len(code.need))]
        self.group: list[int] = code.group.tolist()
        stripes = geometry.stripes
        # Of the stripes of all blocks, one after the other.
        self.checks = np.concatenate([sums_of(check) for check in checks])
        self.sizes = np.concatenate([sizes_of(check) for check in checks])
        # Of the stripes of each piece, for the limits of the range of numbers: the sum of the
        # weights, in units, and the largest exponent.
        self.sums = np.zeros((code.pieces, stripes))
        self.highest = np.zeros((code.pieces, stripes))
        # How many rows of blocks are in each stripe, times their weights in a piece.
        self.rows = np.zeros((code.pieces, stripes))
        # The weights of each block's rows as they are stored; parity is scaled already.
        self.weights = {-1: weights}
        # Rows with NaN or infinity, which are in no check.
        self.skipped: dict[int, npt.NDArray[np.bool_]] = {}
        for j, found in enumerate(exponents):
            self.weights[j] = scaled(weights[: len(found)], found)
            if (gone := found == NOT_FINITE).any():
                self.skipped[j] = gone
        reach = np.abs(code.G).sum(axis=1)
        for piece, (block, group) in enumerate(zip(self.block_of, self.group, strict=True)):
            used = np.abs(self.weights[block]) * _UNIT
            for t, (first, last) in enumerate(itertools.pairwise(self.edges[group])):
                self.rows[piece, t] = (last - first) * reach[piece]
                self.sums[piece, t] = used[first:last].sum()
                if block >= 0:
                    part = exponents[block][first:last]
                    highest = part[part != NOT_FINITE].max(initial=0)
                    # The largest exponent also stands for greater ones.
                    self.highest[piece, t] = math.inf if highest == LARGEST else highest

    def verifier(self, operand: npt.NDArray[Any], growth: Sequence[float]) -> Verifier:
        """Return what checks the shares of one round.

        Parameters
        ----------
        operand : ndarray, shape (columns,) or (columns, m)
        growth : sequence of float
            For each piece, by how many halves of a last place its entries may differ from what the
            checks say: zero unless pieces were rebuilt from others.
        """
        return Verifier(self, operand, growth)


class Verifier:
    """Checks the shares of one round of an array."""

    def __init__(
        self, array: Verification, operand: npt.NDArray[Any], growth: Sequence[float]
    ) -> None:
        self._array = array
        # The operand need not be finite; then nothing is known, see deviation().
        with np.errstate(over="ignore", invalid="ignore"):
            self._prepare(operand, growth)

    def _prepare(self, operand: npt.NDArray[Any], growth: Sequence[float]) -> None:
        array = self._array
        code, plain = array.code, array.code.block_of >= 0
        result, own = np.finfo(np.result_type(array.dtype, operand.dtype)), np.finfo(array.dtype)
        x = operand[:, None] if operand.ndim == 1 else operand
        x = x.astype(np.result_type(x.dtype, np.float64), copy=False)
        n = len(x)
        absolute = np.abs(x)
        # By powers of two, so that what is finite does not overflow.
        exponents = np.frexp(absolute.max(axis=0, initial=0.0))[1]
        self._unit = np.ldexp(1.0, np.clip(exponents, -LARGEST, LARGEST))
        absolute /= self._unit
        shape = code.k, len(array.checks) // code.k, x.shape[1]
        blocks = (array.checks @ x).reshape(shape)
        self._expected = np.empty((code.pieces, *shape[1:]), blocks.dtype)
        self._expected[plain] = blocks[code.block_of[plain]]
        self._expected[~plain] = np.tensordot(code.G[~plain], blocks, axes=1)
        sizes = (array.sizes @ absolute).reshape(shape)
        sizes = np.tensordot(np.abs(code.G), sizes, axes=1)
        rounding = (4 * np.sqrt(n) + n / 16) * float(result.eps) / 2
        rounding += math.sqrt(_BLOCK) * float(np.finfo(blocks.dtype).eps) / 2
        # How often entries were rounded when they were stored, as block and as parity.
        times = np.asarray(growth, dtype=np.float64) + np.where(plain, 0.0, _STORED)
        stored = float(own.eps) / 2
        errors = (rounding + np.where(plain, 0.0, _STORED * stored))[:, None, None] * sizes
        if any(growth):
            errors += stored * np.asarray(growth)[:, None, None] * sizes.max(axis=0)
        # What vanishes when entries are stored, and when rows are scaled for checks.
        least, tiniest = float(result.smallest_normal), _smallest(np.finfo(np.float64))
        vanishing = (times * _smallest(own) / _UNIT)[:, None] * array.sums
        vanishing += tiniest * array.rows
        errors += vanishing[:, :, None] * absolute.sum(axis=0)
        errors *= self._unit
        # And in products and sums.
        errors += (n * least / _UNIT * array.sums + tiniest * (array.rows + n))[:, :, None]
        # What a share of each stripe may deviate by, for each column of the operand.
        self._limits: Floats = _MARGIN * errors
        whole = np.hypot.reduce(self._limits, axis=1)
        self._scale = np.where(np.isfinite(whole), whole, 0.0).max(axis=0, initial=0.0)
        usable = self._scale > 0
        limits = (whole[:, usable] / self._scale[usable]).max(axis=1, initial=0.0)
        #: What a share of all stripes of each piece may deviate by, in units of :meth:`deviation`.
        self.limits: Floats = np.where(np.isfinite(limits), limits, np.inf)
        # A bound of the products of scaled rows; only rows with a larger exponent can overflow.
        with np.errstate(divide="ignore"):
            self._most = np.log2(absolute.sum(axis=0)) + exponents
        self._highest = result.maxexp - 1 - np.maximum(self._most, 0)

    def accepts(self, part: StripeRange, rows: npt.NDArray[Any]) -> bool:
        """Return whether a share agrees with the checks of its stripes.

        Parameters
        ----------
        part : StripeRange
        rows : ndarray, shape (rows of the range,) or (rows of the range, m)
            A share has fewer rows if its block ends within the range.
        """
        return self.deviation(part, rows) == 0

    def deviation(self, part: StripeRange, rows: npt.NDArray[Any]) -> float:
        """Return by how much a share contradicts the checks of its stripes; zero if it agrees.

        For the column of the operand that contradicts them most, in units of the largest limit of
        any piece for this column.
        """
        array, (piece, start, stop) = self._array, part
        block = array.block_of[piece]
        first = array.edges[array.group[piece]][start]
        weights = array.weights[block][first : first + len(rows)]
        if block in array.skipped:
            kept = ~array.skipped[block][first : first + len(rows)]
            weights, rows = weights[kept], rows[kept]
        expected = self._expected[piece, start:stop].sum(axis=0)
        limit = np.hypot.reduce(self._limits[piece, start:stop], axis=0)
        with np.errstate(over="ignore", invalid="ignore"):
            found = _weighted_sum(weights, rows.reshape(len(rows), len(limit)))
            error = np.abs(found - expected)
            agrees = error <= limit
        if agrees.all():
            return 0.0
        # Where the operand is not finite, or the product overflows, nothing is known.
        unknown = ~np.isfinite(expected)
        overflows = array.highest[piece, start:stop].max() >= self._highest
        # So may the weighted sum of products that do not.
        most = self._most + math.log2(max(array.rows[piece, start:stop].sum(), 1.0))
        overflows |= most >= np.finfo(np.float64).maxexp - 1
        unknown |= overflows & ~np.isfinite(found)
        if (agrees | unknown).all():
            return 0.0
        wrong = ~(agrees | unknown)
        with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
            relative = error[wrong] / self._scale[wrong]
        return float(np.where(np.isfinite(relative), relative, np.inf).max())


def _smallest(info: Any) -> float:
    """Return the smallest positive number of a precision."""
    return float(info.smallest_normal) * float(info.eps)
