r"""Verified shares: Freivalds' method [1]_ in floating point.

Whether ``y`` is ``P @ x`` can be checked without computing it again: ``w @ y`` must equal
``(w @ P) @ x`` for a random ``w``, and ``w @ P`` is computed once. Here it is kept for each stripe
``t`` of each block, as a *check*: a row of ``columns`` numbers

.. math:: c_{jt} = \sum_{r \in t} w_r B_j[r]

where ``B_j`` is the block with its rows scaled by powers of two (:mod:`dask_coded.rounds.scaling`),
so that an error in a small row counts as much as one in a large row. Pieces are combinations of
blocks, so the check of piece ``i`` is :math:`\sum_j G_{ij} c_{jt}`, and a piece that was made or
rebuilt wrongly is found too. A share ``y`` of the stripes ``a … b - 1`` is accepted if

.. math::

   \Big| \sum_r w_r y_r - \sum_{t=a}^{b-1} c_{it} x \Big|
   \le K \Big( \sum_r w_r^2 e_r^2 \Big)^{1/2} , \qquad e_r = \gamma \, u \, \|B_r\| \|x\|

with the unit roundoff ``u``. The rounding error of a product of ``n`` terms is at most ``n u``
times ``|B_r| |x|``, and in practice ``4 sqrt(n) u`` [2]_. Sums of equal numbers, which are rounded
in one direction, are covered by ``n / 16``, so :math:`\gamma = 4 \sqrt n + n / 16`. The signs of
``w`` are random, so that the errors of the rows add up to more than the limit with probability
below :math:`2 \exp(-K^2 / 2)` (Hoeffding), 3e-14 with ``K = 8``.

The sums over rows are rounded too. They are summed up in blocks of ``b`` rows and then pairwise. A
sum of ``b`` terms of random sign and of size ``s`` has partial sums of size ``sqrt(b) s``, so its
error is that of terms with errors of ``sqrt(b) u s`` each: :math:`\sqrt b \, u' \, \|B_r\| \|x\|`
is added to :math:`e_r`, with the unit roundoff ``u'`` of the sums, which are in double precision.

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


def random_weights(seed: str, rows: int) -> Floats:
    """Return the weight of each row of a piece: of random sign, between 1/2 and 1."""
    rng = np.random.default_rng(list(seed.encode()))
    return np.asarray(rng.uniform(0.5, 1.0, rows) * rng.choice([-1.0, 1.0], rows))


def empty_check(stripes: int, columns: int, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Return the check of a block without rows: shape (stripes, columns + 1).

    The last column holds ``sum_r (w_r |B_r|)**2`` of each stripe.
    """
    return np.zeros((stripes, columns + 1), np.result_type(dtype, np.float64))


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
    sizes = np.einsum("ij,ij->i", rows, rows.conj()).real * weights[first:last] ** 2
    stripe = max(int(np.searchsorted(edges, first, side="right")) - 1, 0)
    for t in range(stripe, len(check)):
        a, b = max(int(edges[t]), first), min(int(edges[t + 1]), last)
        if a >= last:
            break
        check[t, :-1] += _weighted_sum(weights[a:b], rows[a - first : b - first])
        check[t, -1] += sizes[a - first : b - first].sum()


def size_bounds(
    weights: Floats, edges: npt.NDArray[np.intp], exponents: Exponents, columns: int
) -> Floats:
    """Return what the size of each stripe of a block, ``(sum_r (w_r |B_r|)**2)**0.5``, is at most.

    Entries of scaled rows are at most 1, and those with the largest exponent at most 8. Real and
    imaginary parts count for themselves.
    """
    finite = exponents != NOT_FINITE
    largest = np.where(exponents == LARGEST, 8.0, 1.0)
    terms = np.where(finite, (weights[: len(exponents)] * largest) ** 2, 0.0)
    ends = np.minimum(edges, len(exponents))
    sums = np.diff(np.concatenate([[0.0], np.cumsum(terms)])[ends])
    # Sums of the other order are rounded otherwise.
    return np.asarray(np.sqrt(2.0 * columns * np.maximum(sums, 0.0)) * (1 + 1e-6))


def is_possible(check: Any, bounds: Floats, columns: int) -> bool:
    """Return whether an array can be the check of a block with these :func:`size_bounds`.

    A check with infinity, or with too large a size, would agree with any share.
    """
    return bool(
        isinstance(check, np.ndarray)
        and check.shape == (len(bounds), columns + 1)
        and check.dtype.kind in "fc"
        and np.isfinite(check).all()
        and (check[:, -1].real >= 0).all()
        and (np.sqrt(check[:, -1].real) <= bounds).all()
    )


def check_error(growth: float, dtype: npt.DTypeLike) -> float:
    """Return by how much of their size two checks of one block may differ.

    Parameters
    ----------
    growth : float
        Roundings of rows in the precision of the pieces, in both together.
    dtype : dtype
        Of the pieces.
    """
    rounding = math.sqrt(_BLOCK) * float(np.finfo(np.float64).eps)
    return _MARGIN * (growth * float(np.finfo(np.dtype(dtype)).eps) / 2 + rounding)


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
    checks : sequence of ndarray, each of shape (stripes, columns + 1)
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
        self.checks = np.concatenate([check[:, :-1] for check in checks])
        sizes = np.sqrt(np.stack([check[:, -1].real for check in checks]))
        # Of the stripes of each piece: their sizes; and for the limits of the range of numbers, the
        # sum of the weights and the largest exponent.
        self.sizes: Floats = np.abs(code.G) @ sizes
        self.sums = np.zeros((code.pieces, stripes))
        self.highest = np.zeros((code.pieces, stripes))
        # The weights of each block's rows as they are stored; parity is scaled already.
        self.weights = {-1: weights}
        # Rows with NaN or infinity, which are in no check.
        self.skipped: dict[int, npt.NDArray[np.bool_]] = {}
        for j, found in enumerate(exponents):
            self.weights[j] = scaled(weights[: len(found)], found)
            if (gone := found == NOT_FINITE).any():
                self.skipped[j] = gone
        for piece, (block, group) in enumerate(zip(self.block_of, self.group, strict=True)):
            used = np.abs(self.weights[block])
            for t, (first, last) in enumerate(itertools.pairwise(self.edges[group])):
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
            For each piece, how many roundings its entries differ by from what they were at first:
            zero unless it was rebuilt from others.
        """
        return Verifier(self, operand, growth)


class Verifier:
    """Checks the shares of one round of an array."""

    def __init__(
        self, array: Verification, operand: npt.NDArray[Any], growth: Sequence[float]
    ) -> None:
        self._array = array
        code, plain = array.code, array.code.block_of >= 0
        result = np.finfo(np.result_type(array.dtype, operand.dtype))
        x = operand[:, None] if operand.ndim == 1 else operand
        x = x.astype(np.result_type(x.dtype, np.float64), copy=False)
        n = len(x)
        blocks = (array.checks @ x).reshape(code.k, len(array.checks) // code.k, x.shape[1])
        self._expected = np.empty((code.pieces, *blocks.shape[1:]), blocks.dtype)
        self._expected[plain] = blocks[code.block_of[plain]]
        self._expected[~plain] = np.tensordot(code.G[~plain], blocks, axes=1)
        self._norms = _norms(x)
        rounding = (4 * np.sqrt(n) + n / 16) * float(result.eps) / 2
        stored = float(np.finfo(array.dtype).eps) / 2
        rounding += math.sqrt(_BLOCK) * float(np.finfo(blocks.dtype).eps) / 2
        errors = (rounding + np.where(plain, 0, _STORED * stored)[:, None]) * array.sizes
        errors += stored * np.asarray(growth)[:, None] * array.sizes.max(axis=0)
        self._variance = (_MARGIN * errors) ** 2
        #: What a share of all stripes of each piece may deviate by, in units of the norm.
        self.limits: Floats = np.sqrt(self._variance.sum(axis=1))
        self._underflow = _MARGIN * n * float(result.smallest_normal)
        # Only rows with a larger exponent can overflow, for each column of the operand.
        with np.errstate(divide="ignore"):
            sizes = np.log2(self._norms * np.sqrt(n))
        self._highest = result.maxexp - np.maximum(sizes, 0)

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

        In units of the operand's norm, for that of its columns which contradicts them most.
        """
        array, (piece, start, stop) = self._array, part
        block = array.block_of[piece]
        first = array.edges[array.group[piece]][start]
        weights = array.weights[block][first : first + len(rows)]
        if block in array.skipped:
            kept = ~array.skipped[block][first : first + len(rows)]
            weights, rows = weights[kept], rows[kept]
        expected = self._expected[piece, start:stop].sum(axis=0)
        limit = self._norms * math.sqrt(self._variance[piece, start:stop].sum())
        limit += self._underflow * array.sums[piece, start:stop].sum()
        found = _weighted_sum(weights, rows.reshape(len(rows), len(limit)))
        with np.errstate(invalid="ignore"):
            error = np.abs(found - expected)
            agrees = error <= limit
        if agrees.all():
            return 0.0
        # Where the operand is not finite, or the product overflows, nothing is known.
        unknown = ~np.isfinite(expected)
        overflows = array.highest[piece, start:stop].max() >= self._highest
        unknown |= overflows & ~np.isfinite(found)
        if (agrees | unknown).all():
            return 0.0
        wrong = ~(agrees | unknown)
        with np.errstate(divide="ignore", invalid="ignore"):
            relative = error[wrong] / self._norms[wrong]
        return float(np.where(np.isfinite(relative), relative, np.inf).max())


def _norms(x: npt.NDArray[Any]) -> Floats:
    """Return the 2-norm of each column, also where squares of its entries would overflow."""
    largest = np.abs(x).max(axis=0, initial=0.0)
    usable = np.isfinite(largest) & (largest > 0)
    unit = np.where(usable, largest, 1.0)
    return np.asarray(largest * np.linalg.norm(x / unit, axis=0))
