r"""Powers of two that keep blocks of different magnitude apart in the pieces that combine them.

A parity piece adds up rows of different blocks. In floating point, a row of size 1e12 would swallow
the digits of a row of size 1, and decoding could not bring them back. Therefore each row of a block
is scaled before it is added, so that its largest entry lies between 1/2 and 1:

.. math:: P_i[r] = \sum_j G_{ij} \, 2^{-e_{jr}} A_j[r]

What is decoded is multiplied by :math:`2^{e_{jr}}`. Both are exact, so that the error of each
decoded row is relative to the row itself. Pieces that equal a block are stored as they are; their
shares are scaled only when a missing block is recovered.

The product of a tiny row may be too small a number for the dtype, so that it is rounded to a
multiple of the smallest number. Scaled up, this error would be as large as the rows of other
blocks. Therefore exponents have a lower limit, :func:`least_exponent`. A smaller row counts for
little in the sum. Only its own digits are lost if its block is missing.

A row with NaN or infinity is left out of the sum, so that it does not spread to other blocks. If
its own block is missing, its result is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse

from dask_coded.typing import Bools, Floats

#: One exponent per row of a block.
Exponents = npt.NDArray[np.int16]

#: Stands for the exponent of a row with NaN or infinity.
NOT_FINITE = np.int16(np.iinfo(np.int16).max)
#: Stands for the exponent of the typical entry of a row of zeros, or with NaN or infinity.
NO_ENTRY = np.int16(np.iinfo(np.int16).max)
#: Exponents are at most this, because up to here both 2**e and 2**-e are normal numbers.
LARGEST = 1021

# More than there are exponents.
_KEYS = 4 * LARGEST
# The median of so many entries stands for that of the row. More take longer than the encoding.
_SAMPLE = 32
# With fewer non-zeros in the sample, all entries of the row are looked at.
_FEW = 4


def least_exponent(dtype: npt.DTypeLike) -> int:
    """Return the least exponent by which a row of this dtype is scaled before it is combined.

    No number is smaller than the least one of the dtype, so the product of a row of this size with
    an operand of the size ``eps`` has an error. Once scaled, it is at most ``eps`` of the operand.

    Parameters
    ----------
    dtype : dtype

    Examples
    --------
    >>> least_exponent(np.float32), least_exponent(np.float64)
    (-102, -969)
    """
    # Products of half precision are computed in single precision.
    info = np.finfo(np.result_type(np.dtype(dtype), np.float32))
    return int(info.minexp) + int(info.nmant) + 1


def exponents_of(rows: Any, least: int | None = None) -> Exponents:
    """Return for each row the exponent ``e`` with ``2**(e - 1) <= largest entry < 2**e``.

    Parameters
    ----------
    rows : ndarray or CSR matrix, shape (rows, columns)
        Floating-point or complex numbers; of the latter the larger part counts.
    least : int, optional
        The exponent of smaller rows; by default :func:`least_exponent` of their dtype.

    Returns
    -------
    ndarray of int16, shape (rows,)
        Zero for a row of zeros, :data:`NOT_FINITE` for a row with NaN or infinity.

    Examples
    --------
    >>> exponents_of(np.array([[1.0, -3.0], [0.0, 0.0], [1e-3, 0.0]]))
    array([ 2,  0, -9], dtype=int16)
    """
    if scipy.sparse.issparse(rows):
        if not rows.has_canonical_format:
            # Entries that are stored twice are added up, in a copy: SciPy adds them up in place.
            rows = rows.copy()
            rows.sum_duplicates()
        sizes, filled = _sizes(rows.data), np.diff(rows.indptr) > 0
        largest = np.zeros(len(filled), sizes.dtype)
        largest[filled] = np.maximum.reduceat(sizes, rows.indptr[:-1][filled])
    else:
        largest = _sizes(rows, axis=1)
    least = least_exponent(rows.dtype) if least is None else least
    exponents: Exponents = np.clip(np.frexp(largest)[1], least, LARGEST).astype(np.int16)
    exponents[~np.isfinite(largest)] = NOT_FINITE
    return exponents


def _sizes(values: npt.NDArray[Any], axis: int | None = None) -> npt.NDArray[Any]:
    """Return absolute values, or their maxima along an axis; NaN if any is NaN."""
    if values.dtype.kind == "c":
        sizes = np.maximum(_sizes(values.real, axis), _sizes(values.imag, axis))
    elif axis is None:
        sizes = np.abs(values)
    else:
        # Without an array of absolute values, which would be as large as the rows.
        sizes = np.maximum(values.max(axis=axis), -values.min(axis=axis))
    return np.asarray(sizes)


def typical_of(rows: Any, exponents: Exponents) -> Exponents:
    """Return for each row the exponent of its typical entry, once the row is scaled.

    The typical entry is the median size of the non-zeros, times the fraction of entries that are
    not zero. A few large entries do not change it.

    Parameters
    ----------
    rows : ndarray or CSR matrix, shape (rows, columns)
        Floating-point or complex numbers. Of a dense row with many columns, a sample is examined.
    exponents : ndarray of int16, shape (rows,)
        From :func:`exponents_of`.

    Returns
    -------
    ndarray of int16, shape (rows,)
        The exponent of the power of two nearest to the typical entry. :data:`NO_ENTRY` for a row of
        zeros and for one with NaN or infinity.

    Examples
    --------
    >>> rows = np.array([[1.0, 1024.0, 1.5, -1.1], [0.0, 0.0, 0.0, 0.0]])
    >>> typical_of(rows, exponents_of(rows))
    array([  -10, 32767], dtype=int16)
    """
    if scipy.sparse.issparse(rows):
        return _typical_of_sparse(rows, exponents)
    columns = rows.shape[1]
    chosen: Any = slice(None)
    if columns > _SAMPLE:
        # At random, because columns may have a period, but alike on all workers.
        chosen = np.sort(np.random.default_rng(columns).choice(columns, _SAMPLE, replace=False))
    sizes = np.sort(np.abs(rows[:, chosen]), axis=1)
    width = sizes.shape[1]
    filled = np.count_nonzero(sizes, axis=1)
    middle = np.clip(width - filled + filled // 2, 0, max(width - 1, 0))
    found = np.take_along_axis(sizes, middle[:, None], axis=1)[:, 0] if width else sizes.sum(axis=1)
    typical = _typical(found, filled, width, exponents)
    if width < columns and len(few := np.flatnonzero(filled < _FEW)):
        # SciPy has no sparse matrices of half precision or of the other byte order.
        part = rows[few].astype(np.result_type(rows.dtype, np.float32), copy=False)
        typical[few] = _typical_of_sparse(scipy.sparse.csr_array(part), exponents[few])
    return typical


def _typical_of_sparse(rows: Any, exponents: Exponents) -> Exponents:
    if not rows.data.all():
        rows = rows.copy()  # zeros may be stored; SciPy would remove them in place
        rows.eliminate_zeros()
    filled = np.diff(rows.indptr)
    some = filled > 0
    # Row and exponent in one integer, because sorting by two keys takes twenty times as long.
    sizes = np.abs(rows.data)
    own = np.clip(np.frexp(sizes)[1], -LARGEST, LARGEST).astype(np.int64) + LARGEST
    keys = np.sort(np.repeat(np.arange(len(filled)) * _KEYS, filled) + own)
    found = np.zeros(len(filled))
    middle = rows.indptr[:-1][some] + filled[some] // 2
    # Between the powers of two that bound it.
    found[some] = np.ldexp(0.75, (keys[middle] % _KEYS - LARGEST).astype(np.int32))
    return _typical(found, filled, rows.shape[1], exponents)


def _typical(
    medians: npt.NDArray[Any], filled: npt.NDArray[Any], width: int, exponents: Exponents
) -> Exponents:
    """Return the exponents of medians, times the fraction of entries that are not zero."""
    known = (medians == 0) | (exponents == NOT_FINITE)
    with np.errstate(divide="ignore", invalid="ignore"):
        found = np.log2(medians, dtype=np.float64) + np.log2(filled / max(width, 1)) - exponents
    found[known] = 0
    # Half of the exponents' range, so that squares do not vanish.
    typical: Exponents = np.rint(np.clip(found, -LARGEST // 2, 0)).astype(np.int16)
    typical[known] = NO_ENTRY
    return typical


def squares_of(rows: Any, exponents: Exponents) -> Floats:
    """Return for each column the sum of the squares of its entries, once the rows are scaled.

    Parameters
    ----------
    rows : ndarray or CSR matrix, shape (rows, columns)
    exponents : ndarray of int16, shape (rows,)
        From :func:`exponents_of`.

    Examples
    --------
    >>> rows = np.array([[1.0, 0.0], [6.0, 4.0]])
    >>> squares_of(rows, exponents_of(rows))
    array([0.8125, 0.25  ])
    """
    found = scaled(rows, exponents)
    if scipy.sparse.issparse(found):
        weights = np.square(np.abs(found.data))
        summed: Floats = np.bincount(found.indices, weights, found.shape[1]).astype(np.float64)
        return summed
    squares: Floats = np.einsum("ij,ij->j", found, found.conj()).real
    return squares


def scaled(rows: Any, exponents: Exponents, weight: float = 1.0, out: Any = None) -> Any:
    """Return ``weight * 2**-exponents * rows`` in double precision, zero where not finite.

    Parameters
    ----------
    rows : ndarray, shape (rows, ...), or CSR matrix
    exponents : ndarray of int16, shape (rows,)
    weight : float
    out : ndarray, optional
        Where to put the result of dense rows.
    """
    finite, factors = _powers(exponents, -1)
    if weight != 1:
        factors *= weight
    if scipy.sparse.issparse(rows):
        data = rows.data * np.repeat(factors, np.diff(rows.indptr))
        if finite is not None:
            data[~np.repeat(finite, np.diff(rows.indptr))] = 0
        return scipy.sparse.csr_array((data, rows.indices, rows.indptr), shape=rows.shape)
    out = np.multiply(rows, _along_rows(factors, rows.ndim), out=out)
    if finite is not None:
        out[~finite] = 0
    return out


def restored(rows: Any, exponents: Exponents, out: Any = None) -> Any:
    """Return ``2**exponents * rows``; rows of the block that are not finite are all NaN.

    Parameters
    ----------
    rows : ndarray, shape (rows, ...), or CSR matrix
    exponents : ndarray of int16, shape (rows,)
    out : ndarray, optional
        Where to put the result of dense rows.
    """
    finite, factors = _powers(exponents, 1)
    if finite is not None:
        factors[~finite] = np.nan
    if scipy.sparse.issparse(rows):
        data = rows.data * np.repeat(factors, np.diff(rows.indptr))
        found = scipy.sparse.csr_array((data, rows.indices, rows.indptr), shape=rows.shape)
        if finite is not None:
            # Also where nothing is stored.
            gone, width = np.flatnonzero(~finite), rows.shape[1]
            where = np.repeat(gone, width), np.tile(np.arange(width), len(gone))
            nan = np.full(len(gone) * width, np.nan)
            found += scipy.sparse.csr_array((nan, where), shape=rows.shape)
        return found
    return np.multiply(rows, _along_rows(factors, rows.ndim), out=out)


def _powers(exponents: Exponents, sign: int) -> tuple[Bools | None, Floats]:
    """Return which rows are finite, None for all, and ``2**(sign * exponents)``.

    The powers are put together bit by bit, several times as fast as by ``np.ldexp``.
    """
    finite = None
    if len(exponents) and exponents.max() == NOT_FINITE:
        finite = exponents != NOT_FINITE
        exponents = np.where(finite, exponents, np.int16(0))
    # As far as possible in two bytes, which takes less time than in eight.
    biased = (exponents * np.int16(sign) + np.int16(1023)).astype(np.int64)
    biased <<= 52
    return finite, biased.view(np.float64)


def _along_rows(factors: Floats, dimensions: int) -> Floats:
    return factors.reshape(-1, *(1,) * (dimensions - 1))


@dataclass(frozen=True, eq=False)
class Scales:
    """The exponents that shares of a round are decoded with.

    Parameters
    ----------
    rows : tuple of ndarray
        Of the rows of each block of the result.
    columns : tuple of ndarray, optional
        Of the columns of each block; a pair of matrices scales both factors of its products.
    typical, typical_columns : tuple of ndarray, optional
        Exponents of the typical entries of the scaled rows and columns.
    sizes : ndarray, shape (blocks, columns) or (1, columns), optional
        Root mean square of the entries of the scaled rows of each block, or of all of them, in each
        column of the matrix.
    """

    rows: tuple[Exponents, ...]
    columns: tuple[Exponents, ...] = ()
    typical: tuple[Exponents, ...] = ()
    typical_columns: tuple[Exponents, ...] = ()
    sizes: npt.NDArray[Any] | None = None

    @cached_property
    def lowest(self) -> int:
        """The smallest exponent of any row, at most zero."""
        return min((int(found.min(initial=0)) for found in self.rows), default=0)

    def down(self, block: int, start: int, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """Scale known rows of a block, from row ``start`` on, as they are in parity pieces."""
        scaled(rows, self.rows[block][start : start + len(rows)], out=out)

    def up(self, block: int, start: int, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Restore decoded rows of a block, from row ``start`` on, in place."""
        stop = start + len(rows)
        exponents = self.rows[block][start:stop]
        out: npt.NDArray[Any] = restored(rows, exponents, out=rows)
        if self.typical and (known := self.typical[block][start:stop] == NO_ENTRY).any():
            out[known & (exponents != NOT_FINITE)] = 0  # and not what rounding errors have left
        if self.columns:
            # The last columns of a narrow block are filled up with zeros.
            width = len(self.columns[block])
            out = out[:, :width]
            restored(out.T, self.columns[block], out=out.T)
            if self.typical_columns:
                known = self.typical_columns[block] == NO_ENTRY
                out[:, known & (self.columns[block] != NOT_FINITE)] = 0
        return out
