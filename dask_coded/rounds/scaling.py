r"""Powers of two that keep blocks of different magnitude apart in the pieces that combine them.

A parity piece adds up rows of different blocks. In floating point, a row of size 1e12 would swallow
the digits of a row of size 1, and decoding could not bring them back. Therefore each row of a block
is scaled before it is added, so that its largest entry lies between 1/2 and 1:

.. math:: P_i[r] = \sum_j G_{ij} \, 2^{-e_{jr}} A_j[r]

What is decoded is multiplied by :math:`2^{e_{jr}}`. Both are exact, so that the error of each
decoded row is relative to the row itself. Pieces that equal a block are stored as they are; their
shares are scaled only when a missing block is solved for.

A row with NaN or infinity is left out of the sum, so that it does not spread to other blocks. If
its own block is missing, its result is NaN.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.sparse

from dask_coded.typing import Bools, Floats

#: One exponent per row of a block.
Exponents = npt.NDArray[np.int16]

#: Stands for the exponent of a row with NaN or infinity.
NOT_FINITE = np.int16(np.iinfo(np.int16).max)
#: Exponents are at most this, because up to here both 2**e and 2**-e are normal numbers.
LARGEST = 1021


def exponents_of(rows: Any) -> Exponents:
    """Return for each row the exponent ``e`` with ``2**(e - 1) <= largest entry < 2**e``.

    Parameters
    ----------
    rows : ndarray or CSR matrix, shape (rows, columns)
        Floating-point or complex numbers; of the latter the larger part counts.

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
    exponents: Exponents = np.clip(np.frexp(largest)[1], -LARGEST, LARGEST).astype(np.int16)
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
    biased = exponents.astype(np.int64)
    biased *= sign
    biased += 1023
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
    """

    rows: tuple[Exponents, ...]
    columns: tuple[Exponents, ...] = ()

    def down(self, block: int, start: int, rows: npt.NDArray[Any], out: npt.NDArray[Any]) -> None:
        """Scale known rows of a block, from row ``start`` on, as they are in parity pieces."""
        scaled(rows, self.rows[block][start : start + len(rows)], out=out)

    def up(self, block: int, start: int, rows: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Restore decoded rows of a block, from row ``start`` on, in place."""
        out: npt.NDArray[Any] = restored(
            rows, self.rows[block][start : start + len(rows)], out=rows
        )
        if self.columns:
            # The last columns of a narrow block are filled up with zeros.
            width = len(self.columns[block])
            out = out[:, :width]
            restored(out.T, self.columns[block], out=out.T)
        return out
