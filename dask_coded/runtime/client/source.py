"""Check a matrix to encode, and decide how it is cut."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import dask
import dask.array as da
import numpy as np
import scipy.sparse
from dask.array.core import Array
from distributed import as_completed, wait

from dask_coded.arguments import check_unmasked, meta_of, to_csr
from dask_coded.codes import Code, Polynomial
from dask_coded.loop import PiecesMade

if TYPE_CHECKING:
    from distributed import Client, Future


def matrix_source(A: Any) -> Any:
    """Return ``A`` as a dask array, NumPy array or CSR array; reject anything else."""
    check_arrays()
    check_unmasked("The matrix to encode", A)
    is_array, kind = hasattr(A, "ndim"), type(A).__name__
    if isinstance(A, da.Array) and np.isnan(A.shape).any():
        raise ValueError(
            "The array has chunks of unknown size: call `A.compute_chunk_sizes()` first."
        )
    meta = meta_of(A)
    if hasattr(meta, "todense") and not scipy.sparse.issparse(meta):
        each = "each chunk" if isinstance(A, da.Array) else "it"
        raise TypeError(
            f"The matrix to encode must be of NumPy or SciPy, its type is "
            f"{type(meta).__module__.partition('.')[0]}.{type(meta).__name__}: convert {each} with "
            f"`to_scipy_sparse()`."
        )
    if scipy.sparse.issparse(A):
        A = to_csr(A)
    elif hasattr(A, "to_dask_array"):
        raise TypeError(
            f"The matrix to encode must be an array, it is a {type(A).__name__}: pass "
            "`A.to_dask_array(lengths=True)`."
        )
    elif not isinstance(A, da.Array):
        A = np.asarray(A)
    if A.ndim != 2:
        found = f"its shape is {A.shape}" if A.ndim or is_array else f"not a {kind}"
        how = "" if A.ndim or is_array else ": pass an array"
        if A.ndim == 1:
            how = ": pass `A[:, None]` for a column, or `A[None]` for a row"
        raise TypeError(f"Only a matrix can be encoded, {found}{how}.")
    if not A.shape[0] or not A.shape[1]:
        raise ValueError(f"An empty array cannot be encoded, its shape is {A.shape}.")
    if A.dtype.kind not in "fcibu":
        raise TypeError(
            f"Only numbers and booleans can be encoded, the dtype is {A.dtype}: if it holds "
            "numbers, convert it with `A.astype(float)`."
        )
    return A


def check_arrays() -> None:
    """Check that the arrays of ``dask.array`` have what coded arrays need.

    Raises
    ------
    RuntimeError
        If dask.array plans queries: it then has other arrays, without most functions.
    """
    if da.Array is not Array:
        raise RuntimeError(
            "Coded arrays need dask.array without query planning: unset "
            "`array.query-planning` in Dask's configuration, which is the environment variable "
            "DASK_ARRAY__QUERY_PLANNING, or make it False before dask.array is imported."
        )


def check_code(source: Any, code: Code) -> None:
    """Check that a code can store a matrix.

    Raises
    ------
    TypeError
        If the code is not systematic, or is inexact for the matrix's dtype.
    """
    if not code.systematic:
        pair = " It is for pairs of matrices: use `coded.encode_pair`."
        raise TypeError(
            f"Argument 'code' must be systematic, so that the array's blocks are among its pieces; "
            f"{code!r} is not.{pair * isinstance(code, Polynomial)}"
        )
    check_dtype(source, code, instead=", or use `coded.Repetition`")


def is_long(dtype: np.dtype[Any]) -> bool:
    """Return whether a real number of a dtype has more than 64 bits, as longdouble has on Linux."""
    return dtype.itemsize > (16 if dtype.kind == "c" else 8)


def check_dtype(source: Any, code: Code, instead: str = "") -> None:
    """Check that a code suits the dtype of a matrix; ``instead`` names an alternative.

    Raises
    ------
    TypeError
        If it does not.
    """
    if is_long(source.dtype) and not code.exact:
        raise TypeError(
            f"{code!r} decodes in double precision, in which dtype {source.dtype} loses digits: "
            f"convert with `A.astype(float)` or `A.astype(complex)`{instead}."
        )
    if source.dtype.kind in "biu" and not code.exact:
        raise TypeError(
            f"{code!r} mixes rows in floating point, which makes dtype {source.dtype} inexact: "
            f"convert with `A.astype(float)`{instead}."
        )


def is_verified(source: Any, wanted: bool | None) -> bool:
    """Return whether shares of a matrix are verified, as wanted or as configured.

    Raises
    ------
    TypeError
        If it is wanted, but the matrix is sparse or does not hold floating-point numbers.
    """
    able = sparse_type(source) is None and source.dtype.kind in "fc"
    if wanted and not able:
        what = "sparse" if sparse_type(source) else f"of dtype {source.dtype}"
        raise TypeError(
            f"Argument 'verify' is for dense matrices of floating-point or complex numbers, this "
            f"one is {what}."
        )
    return able and bool(dask.config.get("coded.verify") if wanted is None else wanted)


def sparse_type(source: Any) -> type | None:
    """Return the CSR type for a sparse array, or for the chunks of a dask array; None if dense."""
    meta = meta_of(source)
    if isinstance(meta, scipy.sparse.sparray):
        return scipy.sparse.csr_array
    return scipy.sparse.csr_matrix if scipy.sparse.issparse(meta) else None


def block_rows(source: Any, code: Code) -> tuple[int, ...]:
    """Return the number of rows of each of the k blocks.

    Blocks are equal up to one row. If the code does not mix them, blocks of a SciPy sparse matrix
    have equal numbers of non-zeros instead. None is empty if there are enough rows.
    """
    rows, k = source.shape[0], code.k
    if code.exact and scipy.sparse.issparse(source) and source.nnz:
        # A row costs its non-zeros, plus one for writing its result.
        cost = np.cumsum(np.diff(source.indptr) + 1)
        cuts = np.searchsorted(cost, cost[-1] * np.arange(1, k) / k, side="right")
        if rows >= k:  # a row that costs more than a block does not leave others empty
            first = np.arange(1, k)
            cuts = np.maximum.accumulate(np.maximum(cuts, first) - first) + first
            cuts = np.minimum(cuts, rows - k + first)
    else:
        cuts = np.arange(1, k) * rows // k
    return tuple(np.diff(np.concatenate([[0], cuts, [rows]])).tolist())


def stripes_of(rows: tuple[int, ...], work: float, least: int = 1) -> int:
    """Return the number of stripes that a piece is cut into, as configured.

    Parameters
    ----------
    rows : tuple of int
        Of each block.
    work : float
        Multiply-adds of a piece.
    least : int
        Rows of a stripe, at least.
    """
    most, each = (dask.config.get(f"coded.round.{name}") for name in ("stripes", "stripe-work"))
    wanted = min(most, int(work / each), max(rows) // least)
    return max(wanted, 1)


class PieceCount:
    """Counts pieces as they are made, and passes the numbers on.

    Parameters
    ----------
    listeners : sequence of callable
        Each is called with a :class:`PiecesMade`: at once, and after each piece.
    pieces : int
        Number of pieces of all encodings that this tally counts.
    """

    def __init__(self, listeners: Sequence[Callable[[PiecesMade], object]], pieces: int) -> None:
        self._listeners = listeners
        self._tell(PiecesMade(0, pieces, 0))

    def add(self, nbytes: int) -> None:
        """Count a piece of so many bytes."""
        made, all_bytes = self._last.made + 1, self._last.nbytes + nbytes
        self._tell(replace(self._last, made=made, nbytes=all_bytes))

    def _tell(self, progress: PiecesMade) -> None:
        self._last = progress
        for listener in self._listeners:
            listener(progress)


async def settled(
    client: Client,
    futures: Sequence[Future],
    count: Callable[[Future], Awaitable[None]] | None = None,
) -> None:
    """Wait for all futures and count them, then raise the first error, if any."""
    with client.as_current():
        if count is None:
            await wait(list(futures))
        else:
            async for future in as_completed(list(futures)):
                if future.status == "finished":
                    await count(future)
    for future in futures:
        if future.status != "finished":
            await future
