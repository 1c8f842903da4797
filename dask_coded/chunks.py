"""Chunks of dask arrays whose type or dtype is not what the array declares.

Dask does not look at what tasks return. ``da.from_delayed(..., dtype=int)`` may hold floats, and
SciPy's sparse matrices or data frames may be where NumPy arrays are declared. Dask computes with
what is there. A coded array has the type and the dtype that are declared, so a chunk is converted
if that loses nothing, and refused otherwise.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import scipy.sparse

from dask_coded.arguments import check_unmasked


def as_declared(what: str, chunk: Any, dtype: np.dtype[Any], sparse: type | None = None) -> Any:
    """Return a chunk of a dask array, or rows of one, as the type and dtype that are declared.

    A NumPy array of the declared dtype is returned as it is.

    Parameters
    ----------
    what : str
        What the array is, for messages.
    chunk : ndarray, SciPy sparse matrix or array, data frame, or another type with ``__array__``
    dtype : numpy.dtype
    sparse : type or None
        ``scipy.sparse.csr_array`` or ``csr_matrix`` if the array declares sparse chunks, None if it
        declares dense ones.

    Returns
    -------
    ndarray, or csr_array or csr_matrix, of the chunk's shape

    Raises
    ------
    TypeError
        If the chunk is masked or no matrix, or its dtype cannot be cast safely to the declared one.

    Examples
    --------
    >>> as_declared("A", np.array([[1, 2]]), np.dtype(float))
    array([[1., 2.]])
    >>> as_declared("A", np.array([[0.5]]), np.dtype(int))  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    TypeError: A chunk of A has dtype float64, its dask array declares int64, which cannot hold ...
    """
    declared: Any = sparse or np.ndarray
    if type(chunk) is declared and chunk.dtype == dtype:
        return chunk
    check_type(what, chunk)
    if scipy.sparse.issparse(chunk):
        _check_dtype(what, chunk.dtype, dtype)
        chunk = chunk if chunk.dtype == dtype else chunk.astype(dtype)
        return chunk.toarray() if sparse is None else sparse(_csr(chunk))
    array = np.asarray(chunk)
    _check_dtype(what, array.dtype, dtype)
    array = array.astype(dtype, copy=False)
    return array if sparse is None else sparse(array)


def check_type(what: str, chunk: Any) -> None:
    """Check that a chunk of a dask array is a matrix, of NumPy or SciPy or in a data frame.

    Raises
    ------
    TypeError
        If it is not, or if it is masked.
    """
    check_unmasked(f"A chunk of {what}", chunk)
    if scipy.sparse.issparse(chunk):
        return
    kind = type(chunk)
    found = f"A chunk of {what} is of type {kind.__module__.partition('.')[0]}.{kind.__name__}, "
    if hasattr(chunk, "todense"):
        raise TypeError(f"{found}it must be of NumPy or SciPy: convert it with `todense()`.")
    if not (hasattr(chunk, "__array__") and hasattr(chunk, "shape")):
        raise TypeError(
            f"{found}it must be an array: convert the chunks, as `x.map_blocks(np.asarray)` does."
        )


def some_rows(data: Any, start: int, stop: int) -> Any:
    """Return rows ``start … stop - 1`` of a matrix, a data frame or any sparse matrix, as CSR."""
    if not scipy.sparse.issparse(data):
        return getattr(data, "iloc", data)[start:stop]
    return _csr(data)[start:stop]


def _csr(matrix: Any) -> Any:
    """Return a sparse matrix as CSR.

    Integers and booleans keep all their entries, also several at one place. SciPy would add these
    in the matrix's dtype, in which a sum may overflow. A product adds them in the dtype of its
    result.
    """
    if matrix.format == "csr" or matrix.dtype.kind not in "biu":
        return matrix.tocsr()
    matrix = matrix.tocoo()
    order = np.argsort(matrix.row, kind="stable")
    counts = np.bincount(matrix.row, minlength=matrix.shape[0])
    kind = scipy.sparse.csr_array
    if isinstance(matrix, scipy.sparse.spmatrix):
        kind = scipy.sparse.csr_matrix
    indptr = np.concatenate([[0], np.cumsum(counts)])
    return kind((matrix.data[order], matrix.col[order], indptr), shape=matrix.shape)


def _check_dtype(what: str, found: np.dtype[Any], declared: np.dtype[Any]) -> None:
    if not np.can_cast(found, declared, "safe"):
        raise TypeError(
            f"A chunk of {what} has dtype {found}, its dask array declares {declared}, which "
            f"cannot hold all such values: declare {found} where the array is made, as `dtype=` or "
            f"`meta=` do, or convert the chunks, as "
            f"`x.map_blocks(lambda chunk: chunk.astype({str(declared)!r}))` does."
        )


def unchanging(matrix: Any) -> Any:
    """Return a CSR matrix with the same products that SciPy does not change when it is read.

    SciPy sorts the indices of a row, and adds up several entries of a cell, in place, in functions
    such as ``abs`` and ``>``: a piece would have other products from then on, or wrong ones while
    another thread multiplies by it. So both are done in a copy before. If sums of entries do not
    fit into the dtype, as those of two Trues, such functions raise an error, because the arrays are
    read-only.

    Parameters
    ----------
    matrix : csr_array or csr_matrix
        It is not changed.

    Examples
    --------
    >>> unsorted = scipy.sparse.csr_array(([1.0, 2.0], [1, 0], [0, 2]), shape=(1, 2))
    >>> unchanging(unsorted).indices, unsorted.indices
    (array([0, 1]), array([1, 0]))
    """
    if not matrix.has_canonical_format:
        own = matrix.copy()
        own.sum_duplicates()
        fits = True
        if own.nnz < matrix.nnz and matrix.dtype != (wider := np.result_type(matrix, np.float64)):
            wide = matrix.astype(wider)
            wide.sum_duplicates()
            if matrix.dtype.kind in "biu":
                fits = np.array_equal(own.data, wide.data)
            else:  # apart from rounding
                fits = np.array_equal(np.isfinite(own.data), np.isfinite(wide.data))
        matrix = own if fits else matrix
    parts = matrix.data, matrix.indices, matrix.indptr
    found = type(matrix)(tuple(part.view() for part in parts), shape=matrix.shape)
    found.has_canonical_format = matrix.has_canonical_format
    for part in (found.data, found.indices, found.indptr):
        part.flags.writeable = False
    return found
