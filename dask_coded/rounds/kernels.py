"""Kernels: what a worker can compute on stripes of its piece.

Messages name a kernel in a table, so no function is ever sent over the wire. A kernel is bound to
one piece, to the number of rows of its product and to the operand of a round. The bound function is
then called with ranges of rows, and perhaps with an array for the result.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import scipy.sparse

from dask_coded.registry import Registry

Rows = np.ndarray[Any, Any]
#: ``(a, b, out)``: the rows ``a … b - 1`` of the product, in ``out`` if that is not None.
Product = Callable[[int, int, Rows | None], Rows]
Kernel = Callable[[Any, int, Any], Product]

#: Kernels by name.
KERNELS: Registry[Kernel] = Registry("kernel")


@KERNELS.register("matvec")
def matvec(piece: Any, rows: int, x: Rows) -> Product:
    """Return ``(a, b) -> piece[a:b] @ x`` for a NumPy or CSR piece and a vector or matrix ``x``."""
    if len(x) != piece.shape[1]:  # compiled loops would read what lies behind it
        raise ValueError(f"An operand of {len(x)} rows came for a piece of shape {piece.shape}")
    if scipy.sparse.issparse(piece):
        return _compiled(piece, x) or _sparse(piece, x)
    if np.result_type(piece, x) == np.float16:
        x = x.astype(np.float32)  # pieces are scaled, so their products may overflow
    return lambda a, b, out: np.matmul(piece[a:b], x, out=out)


@KERNELS.register("bilinear")
def bilinear(piece: Rows, rows: int, d: Rows | None) -> Product:
    """Return ``(a, b) -> L[a:b] @ diag(d) @ R.T`` for a piece of ``L`` (``rows`` rows) above ``R``.

    Without ``d`` the product is ``L[a:b] @ R.T``. The weights are applied only to the requested
    rows of ``L``, so no array of the size of a piece is made.
    """
    left, right = piece[:rows], piece[rows:].T
    half = np.result_type(piece, piece if d is None else d) == np.float16  # as above
    # By the first product, because it may take long. NumPy would copy an unaligned one in each.
    factor = cache(lambda: right.astype(np.float32) if half else np.require(right, None, "A"))
    if half and d is not None:
        d = d.astype(np.float32)
    if d is None:
        return lambda a, b, out: np.matmul(left[a:b], factor(), out=out)
    return lambda a, b, out: np.matmul(left[a:b] * d, factor(), out=out)


def _sparse(piece: Any, x: Rows) -> Product:
    data, indices, indptr = piece.data, piece.indices, piece.indptr
    columns = piece.shape[1]

    def product(a: int, b: int, out: Rows | None) -> Rows:
        # Slicing a CSR matrix copies its entries; building one from views does not.
        part = scipy.sparse.csr_array(
            (
                data[indptr[a] : indptr[b]],
                indices[indptr[a] : indptr[b]],
                indptr[a : b + 1] - indptr[a],
            ),
            shape=(b - a, columns),
            copy=False,
        )
        rows: Rows = part @ x
        if out is None:
            return rows
        out[...] = rows
        return out

    return product


def _compiled(piece: Any, x: Rows) -> Product | None:
    """Return the product by SciPy's compiled loops, which need no matrix for each stripe.

    A stripe costs a fraction of building and multiplying a matrix: 1.4 ms for a piece of 40 stripes
    with a million entries instead of 3.4 (the product of the whole piece takes 1.2). In a worker,
    where Dask has freed memory returned at once, the difference is larger.

    None if the loops are not where they are in SciPy 1.13 to 1.17, or if the types of the entries
    and of the operand differ, because SciPy would convert all entries for each stripe.
    """
    data, indices, indptr = piece.data, piece.indices, piece.indptr
    if data.dtype != x.dtype or data.dtype.kind not in "fc" or not data.dtype.isnative:
        return None
    if indices.dtype != indptr.dtype or not x.flags.c_contiguous:
        return None
    try:
        from scipy.sparse._sparsetools import csr_matvec, csr_matvecs
    except ImportError:
        return None
    columns, flat = piece.shape[1], x.ravel()

    def product(a: int, b: int, out: Rows | None) -> Rows:
        if out is None:
            out = np.zeros((b - a, *x.shape[1:]), data.dtype)
        else:
            out[...] = 0  # the loops add to what is there
        # Row pointers index the entries of the whole piece, so they need not start at zero.
        pointers = indptr[a : b + 1]
        if x.ndim == 1:
            csr_matvec(b - a, columns, pointers, indices, data, flat, out)
        else:
            csr_matvecs(b - a, columns, x.shape[1], pointers, indices, data, flat, out.ravel())
        return out

    return product
